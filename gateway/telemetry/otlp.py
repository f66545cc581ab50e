"""Spans and GenAI metrics for OpenTelemetry, by the semantic conventions of HTTP and of generative AI.

https://github.com/open-telemetry/semantic-conventions-genai: in development, so names may change with a version of the
gateway. Spans are made here, after their request has ended: the request path only draws their ids.
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
from opentelemetry.util.types import AttributeValue

from gateway import __version__
from gateway.config.settings import OtlpSettings
from gateway.telemetry.trail import Leg, Trail
from policies.decision import Decision
from policies.features.request import Endpoint

_SCOPE = InstrumentationScope("speculation-gateway", __version__)
_OPERATIONS = {
    Endpoint.CHAT: "chat",
    Endpoint.MESSAGES: "chat",
    Endpoint.RESPONSES: "chat",
    Endpoint.COMPLETIONS: "text_completion",
    Endpoint.EMBEDDINGS: "embeddings",
}
_PROVIDER = "vllm"
_FAILED = frozenset({"engine_error", "unanswered", "interrupted"})
_DURATION_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TOKENS = tuple(4**power for power in range(14))
_ATTEMPT_TIMEOUT_S = 3.0

Attributes = dict[str, AttributeValue]


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
            _of_request(trail, route),
            is_error=trail.label in _FAILED or trail.status >= 500,
        )
        for number, leg in enumerate(trail.legs):
            following = trail.legs[number + 1 : number + 2]
            ended_s = following[0].began_s if following else times.ended_s
            yield self._span(
                _name_of_leg(trail),
                SpanKind.CLIENT,
                _context(trace.trace_id, leg.span_id),
                context,
                (leg.began_s + offset_s, ended_s + offset_s),
                _of_leg(trail, leg, is_last=not following),
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
        operation, outcome = _OPERATIONS.get(trail.endpoint), trail.outcome
        if operation is None or not trail.model:
            return
        attributes: Attributes = _genai(operation, trail.model)
        if trail.legs:
            attributes |= _of_backend(trail.legs[-1])
        error = _error_of(trail)
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


def _of_request(trail: Trail, route: str) -> Attributes:
    attributes: Attributes = {
        "http.request.method": trail.method,
        "url.path": trail.path,
        "url.scheme": "http",
        "http.response.status_code": trail.status,
        "gateway.request_id": trail.request_id.decode("latin-1"),
        "gateway.outcome": trail.label,
        "gateway.queue_wait_s": trail.times.waited_s,
        "gateway.attempts": len(trail.legs),
    }
    texts = {
        "http.route": route,
        "gateway.key": trail.client,
        "gateway.model": trail.model,
        "gateway.retried_from": trail.retried_from,
        "gateway.rescued_from": trail.rescued_from,
        "error.type": _error_of(trail),
    }
    return attributes | {name: text for name, text in texts.items() if text}


def _of_leg(trail: Trail, leg: Leg, *, is_last: bool) -> Attributes:
    decision, operation = leg.decision, _OPERATIONS.get(trail.endpoint)
    attributes: Attributes = _of_backend(leg)
    attributes |= {
        "http.request.method": trail.method,
        "gateway.policy": decision.policy,
        "gateway.reason": decision.reason,
        "gateway.propensity": decision.propensity,
    }
    if (predicted_s := _predicted_s(decision)) is not None:
        attributes["gateway.predicted_s"] = predicted_s
    if operation is not None:
        attributes |= _genai(operation, trail.model)
        attributes |= _of_features(trail)
    if not is_last:
        return attributes | {"error.type": leg.failure or "rescued"}
    attributes["http.response.status_code"] = trail.status
    if error := _error_of(trail):
        attributes["error.type"] = error
    return attributes | _of_outcome(trail, leg)


def _of_features(trail: Trail) -> Attributes:
    """Return the parameters of a request for inference."""
    features = trail.features
    if features is None:
        return {}
    attributes: Attributes = {
        "gen_ai.request.temperature": features.temperature,
        "gen_ai.request.top_p": features.top_p,
        "gen_ai.request.stream": features.stream,
        "gateway.template": features.template,
        "gateway.workload": features.workload,
    }
    if features.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = features.max_tokens
    if features.n != 1:
        attributes["gen_ai.request.choice.count"] = features.n
    return attributes


def _of_outcome(trail: Trail, leg: Leg) -> Attributes:
    """Return the tokens and times of the answer."""
    outcome = trail.outcome
    if outcome is None:
        return {}
    values = {
        "gen_ai.usage.input_tokens": outcome.prompt_tokens,
        "gen_ai.usage.output_tokens": outcome.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": outcome.cached_tokens,
        "gen_ai.response.time_to_first_chunk": None if outcome.ttft_s is None else trail.times.first_s - leg.began_s,
        "gateway.tpot_s": outcome.tpot_s,
        "gateway.tokens_per_step": outcome.tokens_per_step,
        "gateway.drafted_tokens": outcome.drafted_tokens,
        "gateway.accepted_tokens": outcome.accepted_tokens,
    }
    return {name: value for name, value in values.items() if value is not None}


def _genai(operation: str, model: str) -> Attributes:
    return {"gen_ai.operation.name": operation, "gen_ai.provider.name": _PROVIDER, "gen_ai.request.model": model}


def _of_backend(leg: Leg) -> Attributes:
    attributes: Attributes = {"gateway.backend": leg.decision.backend, "gateway.method": leg.method}
    if leg.host:
        attributes["server.address"] = leg.host
    if leg.port:
        attributes["server.port"] = leg.port
    return attributes


def _name_of_leg(trail: Trail) -> str:
    operation = _OPERATIONS.get(trail.endpoint)
    return trail.method if operation is None else f"{operation} {trail.model}"


def _error_of(trail: Trail) -> str:
    """Return the class of the error of a request: the code of a refusal, or the outcome; empty without one."""
    return trail.error or ("" if trail.label == "ok" else trail.label)


def _predicted_s(decision: Decision) -> float | None:
    """Return the seconds that the policy expected of its choice; None if it predicts none."""
    if decision.considered is None:
        return None
    for candidate, predicted_s in zip(decision.considered.candidates, decision.considered.predicted_s, strict=True):
        if candidate.name == decision.backend:
            return None if predicted_s is None else float(predicted_s)
    return None


def _context(trace_id: int, span_id: int, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote, TraceFlags(TraceFlags.SAMPLED))


def _headers(settings: OtlpSettings) -> Mapping[str, str] | None:
    """Return the headers of the settings; None leaves them to the variables of the SDK."""
    return {name: value.get_secret_value() for name, value in settings.headers.items()} or None


def _timeout_s(signal: str) -> float | None:
    """Return the limit of one export, unless a variable of the SDK sets it."""
    names = ("OTEL_EXPORTER_OTLP_TIMEOUT", f"OTEL_EXPORTER_OTLP_{signal}_TIMEOUT")
    return None if any(name in environ for name in names) else _ATTEMPT_TIMEOUT_S
