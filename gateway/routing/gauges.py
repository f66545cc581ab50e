"""The gauges of backends and policies, refreshed every half second."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from backends.backend import Backend
from backends.contradictions import KINDS
from backends.health import SERVING, State
from backends.pool import Pool
from backends.speculation import Method
from backends.watch import Watch
from gateway.routing.model import Model
from gateway.telemetry.registry import Registry

DRAFTER_CAUSES = ("since_restart", "since_wake_up", "since_reload", "unknown")
"""What happened to a replica before its drafter fell silent."""


_SHOWN: Final[Mapping[str, Callable[[Watch], float]]] = {
    "gateway_in_flight": lambda watch: watch.backend.in_flight,
    "gateway_backend_up": lambda watch: watch.backend.health.state in SERVING,
    "gateway_backend_running": lambda watch: watch.backend.load.running,
    "gateway_backend_waiting": lambda watch: watch.backend.load.waiting,
    "gateway_backend_kv_usage_ratio": lambda watch: watch.backend.load.kv_usage,
    "gateway_backend_shares_address": lambda watch: watch.are_several,
    "gateway_backend_tokens_per_step": lambda watch: _of_late(watch, "tokens_per_step"),
    "gateway_backend_acceptance_ratio": lambda watch: _of_late(watch, "rate"),
    "gateway_backend_tokens_per_step_shown_ratio": lambda watch: (
        1.0 if (found := watch.backend.difference) is None else found.shown / found.counted
    ),
}


def _of_late(watch: Watch, name: str) -> float:
    """Return a figure of recent acceptance; NaN if unknown."""
    value: float | None = getattr(watch.backend.engine.acceptance.at(time.monotonic()), name, None)
    return math.nan if value is None else value


def refresh_backends(registry: Registry, pool: Pool) -> None:
    """Show what the pool knows about each backend."""
    shown = [(registry.gauge(name), value_of) for name, value_of in _SHOWN.items()]
    states, contradictions = registry.gauge("gateway_backend_state"), registry.gauge("gateway_backend_contradiction")
    for backend in pool:
        labels = (backend.model, backend.name, backend.declared.method.value)
        for gauge, value_of in shown:
            gauge.labels(*labels).set(value_of(pool.watch(backend)))
        for state in State:
            states.labels(*labels, state.value).set(backend.health.state is state)
        for kind in KINDS:
            contradictions.labels(*labels, kind).set(kind in backend.engine.contradictions)


def refresh_policy(registry: Registry, model: Model, backends: Iterable[Backend]) -> None:
    """Show what a model's policy has found about backends, and about itself."""
    frozen, ratio = registry.gauge("gateway_policy_frozen"), registry.gauge("gateway_policy_ratio_to_least_loaded")
    ejected, silent = (registry.gauge(f"gateway_backend_{name}") for name in ("outlier_ejected", "drafter_silent"))
    name, guardrail, detector = model.name, model.guardrail, model.detector
    if guardrail is not None:
        frozen.labels(name).set(guardrail.frozen)
        ratio.labels(name).set(guardrail.ratio)
    if detector is None:
        return
    for backend in backends:
        ejected.labels(name, backend.name).set(backend.name in detector.reasons)
        silence, method = detector.silent.get(backend.name), backend.declared.method
        for cause in DRAFTER_CAUSES if method is not Method.BASELINE else ():
            labels = (name, backend.name, method.value, cause)
            silent.labels(*labels).set(silence is not None and silence.cause == cause)
