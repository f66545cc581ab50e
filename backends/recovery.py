"""Which replicas may get a request while some of them return to service.

A replica that returns from an ejection gets one request at a time until it has served one (half-open, in terms of
circuit breakers). It and any replica that was down then get a growing share of the load, because an engine that has
just started has empty caches.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Final

from backends.backend import Backend
from backends.health import State

TRIAL: Final = "trial"
"""Reason of the decision that sends a request on trial."""


class Recovery:
    """The replicas that recover, and how many requests each of them may have."""

    def __init__(self, slow_start_s: float) -> None:
        # Seconds until a replica may have as many requests as the others; 0: immediately.
        self.slow_start_s = slow_start_s
        # Their requests on trial, by model and name; usually empty, which the request path checks first.
        self.replicas: dict[tuple[str, str], int] = {}

    def follow(self, backend: Backend) -> None:
        """Track a replica while it recovers."""
        key = backend.model, backend.name
        if backend.health.state is State.RECOVERING:
            self.replicas.setdefault(key, 0)
        else:
            self.replicas.pop(key, None)

    def trials(self, backend: Backend) -> int:
        """Return how many requests on trial a replica has."""
        return self.replicas.get((backend.model, backend.name), 0)

    def is_on_trial(self, backend: Backend) -> bool:
        """Return whether a replica has yet to serve a request."""
        return (backend.model, backend.name) in self.replicas and backend.health.is_on_trial

    def begin_trial(self, backend: Backend) -> None:
        """Count a request sent on trial."""
        self._count(backend, 1)

    def end_trial(self, backend: Backend) -> None:
        """Discount a request on trial that has ended. If the replica is still unproven, the next one is a trial too."""
        self._count(backend, -1)

    def _count(self, backend: Backend, more: int) -> None:
        key = backend.model, backend.name
        if key in self.replicas:
            self.replicas[key] = max(0, self.replicas[key] + more)

    def candidates(
        self, members: Sequence[Backend], tried: Collection[str], *, may_try: bool, now_s: float | None = None
    ) -> list[Backend]:
        """Return the replicas that may get a request, in the order of `members`."""
        now_s = time.monotonic() if now_s is None else now_s
        left = [backend for backend in members if backend.name not in tried]
        up = [backend for backend in left if backend.health.state is State.UP]
        back = [backend for backend in left if (backend.model, backend.name) in self.replicas]
        if not up:
            return back  # better than none
        if may_try:
            for backend in back:
                if backend.health.is_on_trial and not self.trials(backend):
                    return [backend]
        mean = sum(backend.in_flight for backend in up) / sum(backend.weight for backend in up)
        ready = {backend.name for backend in up}
        for backend in back:
            passed_s = now_s - backend.health.returning_since_s
            share = min(1.0, passed_s / self.slow_start_s) if self.slow_start_s else 1.0
            bound = max(1.0, share * mean * backend.weight)
            if not backend.health.is_on_trial and backend.in_flight < bound:
                ready.add(backend.name)
        return [backend for backend in left if backend.name in ready]
