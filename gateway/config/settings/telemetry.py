"""The section `telemetry`: spans for OpenTelemetry, and the log."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from gateway.config.settings.base import Count, HeaderSecret, Settings

Share = Annotated[float, Field(ge=0, le=1)]


def _checked_endpoint(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
        raise ValueError("expected the address of a collector, such as http://collector:4318")
    if "@" in parts.netloc:
        raise ValueError("an address has no password: put it in `headers`")
    return endpoint.rstrip("/")


class OtlpSettings(Settings):
    """Export of spans to an OpenTelemetry collector, by OTLP over HTTP.

    Parameters
    ----------
    endpoint
        Address of the collector; `/v1/traces` is appended. Null takes
        it from `OTEL_EXPORTER_OTLP_ENDPOINT`, or else uses `http://localhost:4318`.
    headers
        Headers of each export.
    sample_ratio
        Share of requests without a trace of their own that get spans. A `traceparent` that says whether a request is
        sampled overrides it.
    queue
        Most requests waiting to be exported; further ones are counted as dropped.
    """

    endpoint: Annotated[str, AfterValidator(_checked_endpoint)] | None = None
    headers: dict[str, HeaderSecret] = {}
    sample_ratio: Share = 1.0
    queue: Count = 4096


class TelemetrySettings(Settings):
    """OpenTelemetry and the log. Changes need a restart.

    Parameters
    ----------
    otlp
        Export of spans to an OpenTelemetry collector, by OTLP over HTTP.
    log_format
        Format of the log; `json` is one object a line.
    access_log
        Share of requests that get a line in the log when they end, chosen at random; 0 for none.
    """

    otlp: OtlpSettings | None = None
    log_format: Literal["text", "json"] = "text"
    access_log: Share = 0.0
