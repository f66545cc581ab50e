"""The gauges of backends and policies, as of the last half second."""

from __future__ import annotations

from collections.abc import Iterable

from backends.backend import Backend, State
from backends.contradictions import KINDS
from backends.speculation import Method
from gateway.routing.series import BACKEND
from gateway.telemetry.registry import Registry
from policies.roles import Freezable

DRAFTER_CAUSES = ("since_restart", "since_wake_up", "since_reload", "unknown")
"""What a replica went through when its drafter fell silent."""


class BackendGauges:
    """What the pool knows of each backend."""

    def __init__(self, registry: Registry) -> None:
        gauge = registry.gauge
        self._in_flight = gauge(
            "gateway_in_flight", "Requests of this gateway in flight at the backend", BACKEND, "livesum"
        )
        self._up = gauge("gateway_backend_up", "1 if the backend may receive requests", BACKEND)
        self._state = gauge("gateway_backend_state", "1 for the current state of the backend", (*BACKEND, "state"))
        self._running = gauge("gateway_backend_running", "Requests in the engine's batch, from all clients", BACKEND)
        self._waiting = gauge("gateway_backend_waiting", "Requests queued in the engine, from all clients", BACKEND)
        self._kv_usage = gauge("gateway_backend_kv_usage_ratio", "KV cache in use, 0 to 1", BACKEND)
        self._contradiction = gauge(
            "gateway_backend_contradiction",
            "1 if the engine's own counters contradict the pool file: `no_speculation` or `no_drafts` though it says a "
            "method, `speculation` though it says `baseline`, another `k`, or drafts in `every_step` of a method that "
            "drafts in some",
            (*BACKEND, "kind"),
        )
        self._shown_over_counted = gauge(
            "gateway_backend_tokens_per_step_shown_ratio",
            "Tokens per step that the answers of the backend show over those that its engine counts, where the two "
            "differ beyond noise; else 1",
            BACKEND,
        )

    def refresh(self, backends: Iterable[Backend]) -> None:
        """Update the gauges."""
        for backend in backends:
            labels = (backend.model, backend.name, backend.said.method.value)
            self._in_flight.labels(*labels).set(backend.in_flight)
            self._up.labels(*labels).set(backend.state in {State.UP, State.RECOVERING})
            for state in State:
                self._state.labels(*labels, state.value).set(backend.state is state)
            found = backend.difference
            self._shown_over_counted.labels(*labels).set(1.0 if found is None else found.shown / found.counted)
            for kind in KINDS:
                self._contradiction.labels(*labels, kind).set(kind in backend.contradictions)
            self._running.labels(*labels).set(backend.load.running)
            self._waiting.labels(*labels).set(backend.load.waiting)
            self._kv_usage.labels(*labels).set(backend.load.kv_usage)


class PolicyGauges:
    """What guarded policies have found."""

    def __init__(self, registry: Registry) -> None:
        gauge = registry.gauge
        self._frozen = gauge(
            "gateway_policy_frozen",
            "1 if the policy was worse than `least_loaded` and `least_loaded` routes in its place",
            ("model",),
            "livemax",
        )
        self._ratio = gauge(
            "gateway_policy_ratio_to_least_loaded",
            "Time per unit of work of the policy over that of `least_loaded`, from blocks of time under each; "
            "NaN while it is too early to tell. Restarts when the policy freezes or thaws",
            ("model",),
        )
        self._ejected = gauge(
            "gateway_backend_outlier_ejected",
            "1 if the policy has ejected the backend for a time, because it does not behave as its method should",
            ("model", "backend"),
            "livemax",
        )
        self._silent = gauge(
            "gateway_backend_drafter_silent",
            "1 if the drafter of the backend gives nothing where its method should, by when it fell silent",
            (*BACKEND, "cause"),
            "livemax",
        )

    def refresh(self, model: str, policy: Freezable, backends: Iterable[Backend]) -> None:
        """Update the gauges of the policy of a model."""
        self._frozen.labels(model).set(policy.guardrail.frozen)
        self._ratio.labels(model).set(policy.guardrail.ratio)
        for backend in backends:
            self._ejected.labels(model, backend.name).set(backend.name in policy.outlier_ejection.reasons)
            if backend.said.method is Method.BASELINE:
                continue
            silence = policy.drafters.silent.get(backend.name)
            for cause in DRAFTER_CAUSES:
                labels = (model, backend.name, backend.said.method.value, cause)
                self._silent.labels(*labels).set(silence is not None and silence.cause == cause)
