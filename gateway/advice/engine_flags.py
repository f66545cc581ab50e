"""Rule: an engine that does not report what the gateway learns from."""

from __future__ import annotations

from typing import Final

from backends.speculation import Method
from gateway.advice.evidence import BackendEvidence, ModelEvidence
from gateway.advice.finding import Finding, flag_change

_MIN_TOKENS: Final = 10_000


def reports(model: ModelEvidence) -> list[Finding]:
    """Return the backends that do not report what the gateway learns from."""
    return [finding for backend in model.backends if (finding := _of_backend(model.name, backend)) is not None]


def _of_backend(model: str, backend: BackendEvidence) -> Finding | None:
    if not backend.has_metrics:
        return Finding(
            "metrics",
            model,
            backend.name,
            "it has no metrics: the load of other clients, its memory and its restarts are not seen",
            None,
            "/metrics has no series vllm:num_requests_running",
            "vllm serve ... without --disable-log-stats",
        )
    share = backend.reported_share
    if backend.method is Method.BASELINE or share is None or share >= 0.5 or backend.output_tokens < _MIN_TOKENS:
        return None
    flag = "--per-request-spec-decode-metrics"
    return Finding(
        "acceptance_reports",
        model,
        backend.name,
        "it does not report the acceptance of each answer: only that of streams can be learned",
        None,
        f"the acceptance of {share:.0%} of {backend.output_tokens:,} output tokens was reported",
        flag_change(model, backend.name, backend.flags, flag, "summary"),
    )
