"""Rules: flags that an engine lacks."""

from __future__ import annotations

import math
from typing import Final

from backends.speculation import Method
from gateway.advice.evidence import BackendEvidence, ModelEvidence
from gateway.advice.finding import Finding, Gain, flag_change

_MIN_TOKENS: Final = 10_000
_TOKENS_TOGETHER: Final = 1000
"""Prompt tokens that are found in a cache or not as one: about a prompt."""


def prefix_caching(model: ModelEvidence) -> list[Finding]:
    """Return the backends without a prefix cache, where that of other backends finds something."""
    others = [one for one in model.backends if one.prefix_caching and one.prefix_queries]
    queries = sum(one.prefix_queries for one in others)
    if queries < _MIN_TOKENS:
        return []
    hits = sum(one.prefix_hits for one in others) / queries
    margin = 1.96 * math.sqrt(hits * (1.0 - hits) * _TOKENS_TOGETHER / queries)
    gain = Gain(hits, max(0.0, hits - margin), min(1.0, hits + margin), "prompt tokens to compute")
    if not gain.is_worth_it:
        return []
    return [
        Finding(
            "prefix_caching",
            model.name,
            backend.name,
            "its prefix cache is off",
            gain,
            f"{queries:,} prompt tokens looked up by {', '.join(one.name for one in others)}",
            flag_change(model.name, backend.name, backend.flags, "--enable-prefix-caching"),
        )
        for backend in model.backends
        if backend.prefix_caching is False
    ]


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
