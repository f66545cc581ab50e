"""Which replicas a request may be sent to while some of them come back into service.

A replica that comes back from an ejection is given one request at a time until it has served one (half-open, in the
words of circuit breakers). It and a replica that was down then get a share of the load that grows with time, because
the caches of an engine that has just started are empty.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from backends.backend import Backend
from backends.health import State

TRIAL: Final = "trial"
"""Reason of the decision that sends a request on trial."""


@dataclass(slots=True)
class _Return:
    """The return of one replica."""

    backend: Backend
    trials: int = 0  # requests on trial that it has


class Recovery:
    """The replicas that recover, and how many requests each of them may have."""

    def __init__(self, slow_start_s: float) -> None:
        # Seconds until a replica may have as many requests as the others; 0 for at once.
        self.slow_start_s = slow_start_s
        # The returns by model and name; empty most of the time, which the request path checks first.
        self.replicas: dict[tuple[str, str], _Return] = {}

    def follow(self, backend: Backend) -> None:
        """Follow a replica while it recovers."""
        key = backend.model, backend.name
        if backend.health.state is not State.RECOVERING:
            self.replicas.pop(key, None)
        elif key not in self.replicas:
            self.replicas[key] = _Return(backend)

    def trials(self, backend: Backend) -> int:
        """Return how many requests on trial a replica has."""
        found = self.replicas.get((backend.model, backend.name))
        return 0 if found is None else found.trials

    def is_on_trial(self, backend: Backend) -> bool:
        """Return whether a replica has yet to serve a request."""
        found = self.replicas.get((backend.model, backend.name))
        return found is not None and backend.health.is_on_trial

    def begin_trial(self, backend: Backend) -> None:
        """Count a request on trial that is sent."""
        if (found := self.replicas.get((backend.model, backend.name))) is not None:
            found.trials += 1

    def end_trial(self, backend: Backend) -> None:
        """Discount a request on trial that has ended. If the replica is not proven yet, the next one is a trial too."""
        if (found := self.replicas.get((backend.model, backend.name))) is not None:
            found.trials = max(0, found.trials - 1)

    def candidates(
        self, members: Sequence[Backend], tried: Collection[str], *, may_try: bool, now_s: float | None = None
    ) -> list[Backend]:
        """Return the replicas that may be sent a request, in the order of `members`."""
        now_s = time.monotonic() if now_s is None else now_s
        left = [backend for backend in members if backend.name not in tried]
        up = [backend for backend in left if backend.health.state is State.UP]
        back = [found for backend in left if (found := self.replicas.get((backend.model, backend.name))) is not None]
        if not up:
            return [found.backend for found in back]  # better than none
        if may_try:
            for found in back:
                if found.backend.health.is_on_trial and not found.trials:
                    return [found.backend]
        mean = sum(backend.in_flight for backend in up) / sum(backend.weight for backend in up)
        ready = {backend.name for backend in up}
        for found in back:
            health = found.backend.health
            passed_s = now_s - health.returning_since_s
            share = min(1.0, passed_s / self.slow_start_s) if self.slow_start_s else 1.0
            bound = max(1.0, share * mean * found.backend.weight)
            if not health.is_on_trial and found.backend.in_flight < bound:
                ready.add(found.backend.name)
        return [backend for backend in left if backend.name in ready]
