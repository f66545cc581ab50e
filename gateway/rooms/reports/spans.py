"""Spans for OpenTelemetry, built after their request has ended: the request path only draws their ids.

Their attributes follow OpenTelemetry's semantic conventions for HTTP and for generative AI,
https://github.com/open-telemetry/semantic-conventions-genai, which are in development, so names may change with a
version of the gateway. Attributes without a name there begin with `gateway.`.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from os import environ

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import AttributeValue

from backends import background
from gateway import __version__
from gateway.config.settings import OtlpSettings
from gateway.relay.accounting import FAILED
from gateway.rooms.reports.trail import Leg, Trail
from policies.build import predicted_s
from policies.features.request import Endpoint

_SCOPE = InstrumentationScope("speculation-gateway", __version__)
_ATTEMPT_TIMEOUT_S = 3.0
_OPERATIONS = {
    Endpoint.CHAT: "chat",
    Endpoint.MESSAGES: "chat",
    Endpoint.RESPONSES: "chat",
    Endpoint.COMPLETIONS: "text_completion",
    Endpoint.EMBEDDINGS: "embeddings",
}

Attributes = dict[str, AttributeValue | None]
"""None and empty texts are left out."""


class _FirstSaid(logging.Handler):
    """Keeps the library's first log message about an export, which best explains a failure."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self.text = self.text or record.getMessage()


class Spans:
    """Exports a span for each sampled request, and a child span for each attempt."""

    signal = "spans"

    def __init__(self, settings: OtlpSettings, scheme: str) -> None:
        self._scheme = scheme  # of the gateway's address
        self._said = _FirstSaid()
        library = logging.getLogger("opentelemetry")  # the outlet counts and logs failed exports
        library.setLevel(logging.WARNING)
        library.propagate = False
        library.addHandler(self._said)
        self._resource = _resource()
        endpoint = None if settings.endpoint is None else f"{settings.endpoint}/v1/traces"
        headers = {name: value.get_secret_value() for name, value in settings.headers.items()}
        self._exporter = OTLPSpanExporter(endpoint, headers=headers or None, timeout=_timeout_s())

    def write(self, trails: Sequence[Trail]) -> str:
        """Export the spans of requests."""
        offset_s = time.time() - time.perf_counter()
        spans: list[ReadableSpan] = []
        for trail in trails:
            with background.guarded("observers", of="spans"):
                spans += self._spans(trail, offset_s)
        self._said.text = ""
        result = self._exporter.export(spans)
        return "" if result is SpanExportResult.SUCCESS else self._said.text or "the collector does not take them"

    def close(self) -> None:
        """Close the connection, and stop waiting for an unreachable collector."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _spans(self, trail: Trail, offset_s: float) -> Iterator[ReadableSpan]:
        trace = trail.trace
        assert trace is not None
        context = _context(trace.trace_id, trace.span_id)
        parent = None if trail.parent is None else _context(trace.trace_id, trail.parent.span_id, is_remote=True)
        route = trail.path if trail.endpoint is not Endpoint.OTHER else ""
        yield self._span(
            f"{trail.method} {route}".rstrip(),
            SpanKind.SERVER,
            context,
            parent,
            (trail.arrived_s + offset_s, trail.ended_s + offset_s),
            _of_request(trail, route) | {"url.scheme": self._scheme},
            is_error=trail.label in FAILED or trail.status >= 500,
        )
        operation = _OPERATIONS.get(trail.endpoint)
        for number, leg in enumerate(trail.legs):
            following = trail.legs[number + 1 : number + 2]
            ended_s = following[0].began_s if following else trail.ended_s
            yield self._span(
                trail.method if operation is None else f"{operation} {trail.model}",
                SpanKind.CLIENT,
                _context(trace.trace_id, leg.span_id),
                context,
                (leg.began_s + offset_s, ended_s + offset_s),
                _of_leg(trail, leg, operation, is_last=not following),
                is_error=bool(following) or trail.label in FAILED or trail.status >= 400,
            )

    def _span(
        self,
        name: str,
        kind: SpanKind,
        context: SpanContext,
        parent: SpanContext | None,
        between_s: tuple[float, float],
        attributes: Mapping[str, AttributeValue | None],
        *,
        is_error: bool,
    ) -> ReadableSpan:
        return ReadableSpan(
            name,
            context,
            parent,
            self._resource,
            {name: value for name, value in attributes.items() if value is not None and value != ""},
            kind=kind,
            status=Status(StatusCode.ERROR if is_error else StatusCode.UNSET),
            start_time=int(1e9 * between_s[0]),
            end_time=int(1e9 * between_s[1]),
            instrumentation_scope=_SCOPE,
        )


def _of_request(trail: Trail, route: str) -> Attributes:
    """Return the attributes of the span of a request; `route` is empty unless the path is for inference."""
    return {
        "http.request.method": trail.method,
        "http.route": route,
        "url.path": trail.path,
        "http.response.status_code": trail.status,
        "error.type": _error_of(trail),
        "gateway.request_id": trail.request_id.decode("latin-1"),
        "gateway.outcome": trail.label,
        "gateway.queue_wait_s": trail.waited_s,
        "gateway.attempts": len(trail.legs),
        "gateway.key": trail.client,
        "gateway.model": trail.model,
        "gateway.retried_from": trail.retried_from,
        "gateway.rescued_from": trail.rescued_from,
    }


def _of_leg(trail: Trail, leg: Leg, operation: str | None, *, is_last: bool) -> Attributes:
    """Return the attributes of the span of an attempt; the last one gave the answer."""
    decision, features, outcome = leg.decision, trail.features, trail.outcome
    attributes: Attributes = {
        "http.request.method": trail.method,
        "server.address": leg.host,
        "server.port": leg.port or None,
        "gateway.backend": decision.backend,
        "gateway.method": leg.method,
        "gateway.policy": decision.policy,
        "gateway.reason": decision.reason,
        "gateway.propensity": decision.propensity,
        "gateway.predicted_s": predicted_s(decision),
    }
    if operation is not None:
        attributes |= {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "vllm",
            "gen_ai.request.model": trail.model,
        }
    if operation is not None and features is not None:
        attributes |= {
            "gen_ai.request.temperature": features.temperature,
            "gen_ai.request.top_p": features.top_p,
            "gen_ai.request.stream": features.stream,
            "gen_ai.request.max_tokens": features.max_tokens,
            "gen_ai.request.choice.count": None if features.n == 1 else features.n,
            "gateway.template": features.template,
            "gateway.workload": features.workload,
        }
    if not is_last:
        return attributes | {"error.type": leg.failure or "rescued"}
    attributes |= {"http.response.status_code": trail.status, "error.type": _error_of(trail)}
    if outcome is not None:
        attributes |= {
            "gen_ai.usage.input_tokens": outcome.prompt_tokens,
            "gen_ai.usage.output_tokens": outcome.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": outcome.cached_tokens,
            "gen_ai.response.time_to_first_chunk": None if outcome.ttft_s is None else trail.first_s - leg.began_s,
            "gateway.estimated": outcome.is_estimated or None,
            "gateway.tpot_s": outcome.tpot_s,
            "gateway.tokens_per_step": outcome.tokens_per_step,
            "gateway.drafted_tokens": outcome.drafted_tokens,
            "gateway.accepted_tokens": outcome.accepted_tokens,
        }
    return attributes


def _error_of(trail: Trail) -> str:
    """Return the class of the error of a request: the code of a refusal, or the outcome; empty without one."""
    return trail.error or ("" if trail.label == "ok" else trail.label)


def _resource() -> Resource:
    """Return the attributes of this process; `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` override them."""
    own = {
        "service.name": "speculation-gateway",
        "service.version": __version__,
        "service.instance.id": str(uuid.uuid4()),  # one of several workers
    }
    return Resource.create().merge(Resource(own)).merge(OTELResourceDetector().detect())


def _context(trace_id: int, span_id: int, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote, TraceFlags(TraceFlags.SAMPLED))


def _timeout_s() -> float | None:
    """Return the limit of one export, unless a variable of the SDK sets it."""
    names = ("OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT")
    return None if any(name in environ for name in names) else _ATTEMPT_TIMEOUT_S
