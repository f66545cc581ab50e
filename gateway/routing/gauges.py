"""The gauges of backends and policies, as of the last half second."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from backends.backend import Backend
from backends.contradictions import KINDS
from backends.health import SERVING, State
from backends.pool import Pool
from backends.speculation import Method
from gateway.routing.model import Model
from gateway.telemetry.registry import Registry

DRAFTER_CAUSES = ("since_restart", "since_wake_up", "since_reload", "unknown")
"""What a replica went through when its drafter fell silent."""


class BackendGauges:
    """What the pool knows of each backend."""

    def __init__(self, registry: Registry) -> None:
        gauge = registry.gauge
        self._in_flight = gauge("gateway_in_flight")
        self._up = gauge("gateway_backend_up")
        self._state = gauge("gateway_backend_state")
        self._running = gauge("gateway_backend_running")
        self._waiting = gauge("gateway_backend_waiting")
        self._kv_usage = gauge("gateway_backend_kv_usage_ratio")
        self._contradiction = gauge("gateway_backend_contradiction")
        self._shares_address = gauge("gateway_backend_shares_address")
        self._tokens_per_step = gauge("gateway_backend_tokens_per_step")
        self._acceptance = gauge("gateway_backend_acceptance_ratio")
        self._shown_over_counted = gauge("gateway_backend_tokens_per_step_shown_ratio")

    def refresh(self, pool: Pool) -> None:
        """Update the gauges."""
        now_s = time.monotonic()
        for backend in pool:
            labels = (backend.model, backend.name, backend.said.method.value)
            self._in_flight.labels(*labels).set(backend.in_flight)
            self._up.labels(*labels).set(backend.health.state in SERVING)
            for state in State:
                self._state.labels(*labels, state.value).set(backend.health.state is state)
            self._shares_address.labels(*labels).set(pool.watch(backend).are_several)
            found = backend.difference
            self._shown_over_counted.labels(*labels).set(1.0 if found is None else found.shown / found.counted)
            of_late = backend.engine.acceptance.at(now_s)
            rate = None if of_late is None else of_late.rate
            self._tokens_per_step.labels(*labels).set(math.nan if of_late is None else of_late.tokens_per_step)
            self._acceptance.labels(*labels).set(math.nan if rate is None else rate)
            for kind in KINDS:
                self._contradiction.labels(*labels, kind).set(kind in backend.engine.contradictions)
            self._running.labels(*labels).set(backend.load.running)
            self._waiting.labels(*labels).set(backend.load.waiting)
            self._kv_usage.labels(*labels).set(backend.load.kv_usage)


class PolicyGauges:
    """What policies have found of backends, and of themselves."""

    def __init__(self, registry: Registry) -> None:
        gauge = registry.gauge
        self._frozen = gauge("gateway_policy_frozen")
        self._ratio = gauge("gateway_policy_ratio_to_least_loaded")
        self._ejected = gauge("gateway_backend_outlier_ejected")
        self._silent = gauge("gateway_backend_drafter_silent")

    def refresh(self, model: Model, backends: Iterable[Backend]) -> None:
        """Update the gauges of the policy of a model."""
        name, guardrail, detector = model.name, model.guardrail, model.detector
        if guardrail is not None:
            self._frozen.labels(name).set(guardrail.frozen)
            self._ratio.labels(name).set(guardrail.ratio)
        if detector is None:
            return
        for backend in backends:
            self._ejected.labels(name, backend.name).set(backend.name in detector.reasons)
            if backend.said.method is Method.BASELINE:
                continue
            silence = detector.silent.get(backend.name)
            for cause in DRAFTER_CAUSES:
                labels = (name, backend.name, backend.said.method.value, cause)
                self._silent.labels(*labels).set(silence is not None and silence.cause == cause)
