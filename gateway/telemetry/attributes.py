"""The attributes of spans and metrics, by OpenTelemetry's semantic conventions of HTTP and of generative AI.

https://github.com/open-telemetry/semantic-conventions-genai: in development, so names may change with a version of the
gateway. What has no name there begins with `gateway.`.
"""

from __future__ import annotations

from opentelemetry.util.types import AttributeValue

from gateway.telemetry.trail import Leg, Trail
from policies.decision import Decision
from policies.features.request import Endpoint

OPERATIONS = {
    Endpoint.CHAT: "chat",
    Endpoint.MESSAGES: "chat",
    Endpoint.RESPONSES: "chat",
    Endpoint.COMPLETIONS: "text_completion",
    Endpoint.EMBEDDINGS: "embeddings",
}
_PROVIDER = "vllm"

Attributes = dict[str, AttributeValue]


def of_request(trail: Trail, route: str) -> Attributes:
    """Return the attributes of the span of a request; `route` is empty for a path that is not one for inference."""
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
        "error.type": error_of(trail),
    }
    return attributes | {name: text for name, text in texts.items() if text}


def of_leg(trail: Trail, leg: Leg, *, is_last: bool) -> Attributes:
    """Return the attributes of the span of an attempt, the last of which gave the answer."""
    decision, operation = leg.decision, OPERATIONS.get(trail.endpoint)
    attributes: Attributes = of_backend(leg)
    attributes |= {
        "http.request.method": trail.method,
        "gateway.policy": decision.policy,
        "gateway.reason": decision.reason,
        "gateway.propensity": decision.propensity,
    }
    if (predicted_s := _predicted_s(decision)) is not None:
        attributes["gateway.predicted_s"] = predicted_s
    if operation is not None:
        attributes |= genai(operation, trail.model)
        attributes |= _of_features(trail)
    if not is_last:
        return attributes | {"error.type": leg.failure or "rescued"}
    attributes["http.response.status_code"] = trail.status
    if error := error_of(trail):
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
        "gateway.estimated": True if outcome.is_estimated else None,
        "gateway.tpot_s": outcome.tpot_s,
        "gateway.tokens_per_step": outcome.tokens_per_step,
        "gateway.drafted_tokens": outcome.drafted_tokens,
        "gateway.accepted_tokens": outcome.accepted_tokens,
    }
    return {name: value for name, value in values.items() if value is not None}


def genai(operation: str, model: str) -> Attributes:
    """Return what all spans and metrics of a request for inference have."""
    return {"gen_ai.operation.name": operation, "gen_ai.provider.name": _PROVIDER, "gen_ai.request.model": model}


def of_backend(leg: Leg) -> Attributes:
    """Return the attributes that tell the backend."""
    attributes: Attributes = {"gateway.backend": leg.decision.backend, "gateway.method": leg.method}
    if leg.host:
        attributes["server.address"] = leg.host
    if leg.port:
        attributes["server.port"] = leg.port
    return attributes


def name_of_leg(trail: Trail) -> str:
    """Return the name of the span of an attempt."""
    operation = OPERATIONS.get(trail.endpoint)
    return trail.method if operation is None else f"{operation} {trail.model}"


def error_of(trail: Trail) -> str:
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
