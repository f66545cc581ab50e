"""The series of background work: reloads, discoveries, and failures."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import get_args

from backends.background import CORE_WORK
from gateway.gateway import Room
from gateway.reload.reloader import Cause, Outcome
from gateway.telemetry.registry import Registry


class BesideSeries:
    """Counts reloads, answers of sources of replicas, and failures of background work."""

    def __init__(self, registry: Registry, rooms: Iterable[Room | type[Room]]) -> None:
        self._reloads = registry.counter("gateway_reloads")
        self._discoveries = registry.counter("gateway_discoveries")
        self._discovered = registry.gauge("gateway_discovered_backends")
        self._failures = registry.counter("gateway_background_failures")
        # Created now: the rate of a series that starts with an event misses that event.
        for cause, outcome in product(get_args(Cause), get_args(Outcome)):
            self._reloads.labels(cause, outcome)
        for work in (*CORE_WORK, *(work for room in rooms for work in room.work)):
            self._failures.labels(work)

    def count_reload(self, cause: str, outcome: str) -> None:
        """Count a reload of the pool file."""
        self._reloads.labels(cause, outcome).inc()

    def count_discovery(self, model: str, source: str, outcome: str, replicas: int) -> None:
        """Count an answer of a source of replicas, and set the number that it found."""
        self._discoveries.labels(model, source, outcome).inc()
        self._discovered.labels(model, source).set(replicas)

    def count_failure(self, work: str) -> None:
        """Count a failure of background work; called on the event loop."""
        self._failures.labels(work).inc()
