"""Spans and GenAI metrics for OpenTelemetry.

Spans are made here, after their request has ended: the request path only draws their ids.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from os import environ
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import Histogram
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from gateway import __version__
from gateway.config.settings import OtlpSettings
from gateway.telemetry.attributes import (
    OPERATIONS,
    Attributes,
    error_of,
    genai,
    name_of_leg,
    of_backend,
    of_leg,
    of_request,
)
from gateway.telemetry.trail import Trail
from policies.features.request import Endpoint

_SCOPE = InstrumentationScope("speculation-gateway", __version__)
_FAILED = frozenset({"engine_error", "unanswered", "interrupted"})
_DURATION_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TOKENS = tuple(4**power for power in range(14))
_ATTEMPT_TIMEOUT_S = 3.0


class Spans:
    """Exports a span for each sampled request, and one below it for each attempt."""

    signal = "spans"

    def __init__(self, settings: OtlpSettings, resource: Resource) -> None:
        self._resource = resource
        endpoint = None if settings.endpoint is None else f"{settings.endpoint}/v1/traces"
        self._exporter = OTLPSpanExporter(endpoint, headers=_headers(settings), timeout=_timeout_s("TRACES"))

    def write(self, trails: Sequence[Trail]) -> bool:
        """Export the spans of requests."""
        offset_s = time.time() - time.perf_counter()
        spans = [span for trail in trails for span in self._spans(trail, offset_s)]
        return self._exporter.export(spans) is SpanExportResult.SUCCESS

    def close(self) -> None:
        """End the connection, and the wait for a collector that is out of reach."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _spans(self, trail: Trail, offset_s: float) -> Iterator[ReadableSpan]:
        trace = trail.trace
        assert trace is not None
        context = _context(trace.trace_id, trace.span_id)
        parent = None if trail.parent is None else _context(trace.trace_id, trail.parent.span_id, is_remote=True)
        times = trail.times
        route = trail.path if trail.endpoint is not Endpoint.OTHER else ""
        yield self._span(
            f"{trail.method} {route}".rstrip(),
            SpanKind.SERVER,
            context,
            parent,
            (times.arrived_s + offset_s, times.ended_s + offset_s),
            of_request(trail, route),
            is_error=trail.label in _FAILED or trail.status >= 500,
        )
        for number, leg in enumerate(trail.legs):
            following = trail.legs[number + 1 : number + 2]
            ended_s = following[0].began_s if following else times.ended_s
            yield self._span(
                name_of_leg(trail),
                SpanKind.CLIENT,
                _context(trace.trace_id, leg.span_id),
                context,
                (leg.began_s + offset_s, ended_s + offset_s),
                of_leg(trail, leg, is_last=not following),
                is_error=bool(following) or trail.label in _FAILED or trail.status >= 400,
            )

    def _span(
        self,
        name: str,
        kind: SpanKind,
        context: SpanContext,
        parent: SpanContext | None,
        between_s: tuple[float, float],
        attributes: Attributes,
        *,
        is_error: bool,
    ) -> ReadableSpan:
        return ReadableSpan(
            name,
            context,
            parent,
            self._resource,
            attributes,
            kind=kind,
            status=Status(StatusCode.ERROR if is_error else StatusCode.UNSET),
            start_time=int(1e9 * between_s[0]),
            end_time=int(1e9 * between_s[1]),
            instrumentation_scope=_SCOPE,
        )


class _Exporter(OTLPMetricExporter):
    """Exports metrics, and remembers whether the last export succeeded."""

    has_failed = False

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        """Export metrics."""
        result = super().export(metrics_data, timeout_millis, **kwargs)
        self.has_failed = result is not MetricExportResult.SUCCESS
        return result


class GenAiMetrics:
    """Exports the metrics that the conventions define for servers of models, and the tokens."""

    signal = "metrics"

    def __init__(self, settings: OtlpSettings, resource: Resource) -> None:
        endpoint = None if settings.endpoint is None else f"{settings.endpoint}/v1/metrics"
        self._exporter = _Exporter(endpoint, headers=_headers(settings), timeout=_timeout_s("METRICS"))
        reader = PeriodicExportingMetricReader(self._exporter)
        self._provider = MeterProvider([reader], resource, shutdown_on_exit=False)
        meter = self._provider.get_meter(_SCOPE.name, _SCOPE.version)

        def histogram(name: str, unit: str, text: str, bounds: Sequence[float]) -> Histogram:
            return meter.create_histogram(name, unit, text, explicit_bucket_boundaries_advisory=bounds)

        self._duration = histogram("gen_ai.server.request.duration", "s", "Duration of a request", _DURATION_S)
        self._first_token = histogram(
            "gen_ai.server.time_to_first_token", "s", "Time to the first token", _FIRST_TOKEN_S
        )
        self._per_token = histogram(
            "gen_ai.server.time_per_output_token", "s", "Time per output token after the first", _PER_TOKEN_S
        )
        self._tokens = histogram("gen_ai.client.token.usage", "{token}", "Tokens of a request", _TOKENS)

    def write(self, trails: Sequence[Trail]) -> bool:
        """Count requests; the SDK exports the sums periodically. Return whether the last export succeeded."""
        for trail in trails:
            self._count(trail)
        return not self._exporter.has_failed

    def close(self) -> None:
        """Export for the last time."""
        self._provider.shutdown(timeout_millis=1000.0 * _ATTEMPT_TIMEOUT_S)

    def _count(self, trail: Trail) -> None:
        operation, outcome = OPERATIONS.get(trail.endpoint), trail.outcome
        if operation is None or not trail.model:
            return
        attributes: Attributes = genai(operation, trail.model)
        if trail.legs:
            attributes |= of_backend(trail.legs[-1])
        error = error_of(trail)
        failed = attributes | {"error.type": error} if error else attributes
        self._duration.record(trail.times.ended_s - trail.times.arrived_s, failed)
        if outcome is None:
            return
        if outcome.ttft_s is not None:
            self._first_token.record(outcome.ttft_s + trail.times.waited_s, attributes)
        if outcome.tpot_s is not None:
            self._per_token.record(outcome.tpot_s, attributes)
        self._tokens.record(outcome.prompt_tokens, attributes | {"gen_ai.token.type": "input"})
        self._tokens.record(outcome.output_tokens, attributes | {"gen_ai.token.type": "output"})


def resource() -> Resource:
    """Return what is exported about this process; `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` override it."""
    own = {
        "service.name": "speculation-gateway",
        "service.version": __version__,
        "service.instance.id": str(uuid.uuid4()),  # each worker has its own sums
    }
    return Resource.create().merge(Resource(own)).merge(OTELResourceDetector().detect())


def quiet_sdk() -> None:
    """Keep the SDK from logging each failed export: the outlet counts and logs them."""
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)


def _context(trace_id: int, span_id: int, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote, TraceFlags(TraceFlags.SAMPLED))


def _headers(settings: OtlpSettings) -> Mapping[str, str] | None:
    """Return the headers of the settings; None leaves them to the variables of the SDK."""
    return {name: value.get_secret_value() for name, value in settings.headers.items()} or None


def _timeout_s(signal: str) -> float | None:
    """Return the limit of one export, unless a variable of the SDK sets it."""
    names = ("OTEL_EXPORTER_OTLP_TIMEOUT", f"OTEL_EXPORTER_OTLP_{signal}_TIMEOUT")
    return None if any(name in environ for name in names) else _ATTEMPT_TIMEOUT_S
