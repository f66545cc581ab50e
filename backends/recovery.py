"""The way back of replicas into service: one request on trial, then slow start.

A replica that comes back from an ejection is given one request at a time until it has served one (half-open, in the
words of circuit breakers). It and a replica that was down then get a share of the load that grows with time, because
the caches of an engine that has just started are empty.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from backends.backend import Backend, State

TRIAL: Final = "trial"
"""Reason of the decision that sends a request on trial."""

_MAX_TRIAL_S: Final = 60.0
"""After this time without a request that could be sent on trial, the replica returns without one."""


@dataclass(slots=True)
class _Return:
    """The return of one replica; `began_s` is the begin of its trial, then that of its slow start."""

    backend: Backend
    began_s: float
    on_trial: bool
    trials: int = 0


class Recovery:
    """The replicas that recover, and how many requests each of them may have.

    Examples
    --------
    >>> from backends.speculation import Method
    >>> up, back = (Backend(name, "m", Method.BASELINE, "http://127.0.0.1:1", state=State.UP) for name in "ab")
    >>> recovery = Recovery(slow_start_s=10.0)
    >>> back.state = State.RECOVERING
    >>> recovery.enter(back, on_trial=True, now_s=0.0)
    >>> [backend.name for backend in recovery.candidates([up, back], (), may_try=True, now_s=0.0)]
    ['b']
    >>> recovery.begin_trial(back)
    >>> [backend.name for backend in recovery.candidates([up, back], (), may_try=True, now_s=0.0)]
    ['a']
    """

    def __init__(self, slow_start_s: float) -> None:
        # Seconds until a replica may have as many requests as the others; 0 for at once.
        self.slow_start_s = slow_start_s
        # The returns by model and name; empty most of the time, which the request path checks first.
        self.replicas: dict[tuple[str, str], _Return] = {}

    def enter(self, backend: Backend, *, on_trial: bool, now_s: float) -> None:
        """Begin the return of a replica."""
        self.replicas[backend.model, backend.name] = _Return(backend, now_s, on_trial)

    def leave(self, backend: Backend) -> None:
        """End the return of a replica, which is up or out again."""
        self.replicas.pop((backend.model, backend.name), None)

    def is_on_trial(self, backend: Backend) -> bool:
        """Return whether a replica has yet to serve a request."""
        found = self.replicas.get((backend.model, backend.name))
        return found is not None and found.on_trial

    def begin_trial(self, backend: Backend) -> None:
        """Count a request on trial that is sent."""
        if (found := self.replicas.get((backend.model, backend.name))) is not None:
            found.trials += 1

    def end_trial(self, backend: Backend) -> None:
        """Discount a request on trial that has ended. If the replica is not proven yet, the next one is a trial too."""
        if (found := self.replicas.get((backend.model, backend.name))) is not None:
            found.trials = max(0, found.trials - 1)

    def advance(self, backend: Backend, now_s: float, *, served: bool = False) -> bool:
        """Go on with a return as time passes or the replica has served a request; return whether it is complete."""
        found = self.replicas.get((backend.model, backend.name))
        if found is None:
            return True
        if found.on_trial:
            if not served and (found.trials or now_s - found.began_s < _MAX_TRIAL_S):
                return False
            found.on_trial, found.began_s = False, now_s
        return now_s - found.began_s >= self.slow_start_s

    def candidates(
        self, members: Sequence[Backend], tried: Collection[str], *, may_try: bool, now_s: float | None = None
    ) -> list[Backend]:
        """Return the replicas that may be sent a request, in the order of `members`."""
        now_s = time.monotonic() if now_s is None else now_s
        left = [backend for backend in members if backend.name not in tried]
        up = [backend for backend in left if backend.state is State.UP]
        back = [found for backend in left if (found := self.replicas.get((backend.model, backend.name))) is not None]
        if not up:
            return [found.backend for found in back]  # better than none
        if may_try:
            for found in back:
                if found.on_trial and not found.trials:
                    return [found.backend]
        mean = sum(backend.in_flight for backend in up) / sum(backend.weight for backend in up)
        ready = {backend.name for backend in up}
        for found in back:
            share = 1.0 if not self.slow_start_s else min(1.0, (now_s - found.began_s) / self.slow_start_s)
            bound = max(1.0, share * mean * found.backend.weight)
            if not found.on_trial and found.backend.in_flight < bound:
                ready.add(found.backend.name)
        return [backend for backend in left if backend.name in ready]

    def describe(self, backend: Backend) -> str:
        """Return the stage of a return, for people."""
        if self.is_on_trial(backend):
            return "on trial: gets one request at a time until it has served one"
        return f"slow start: gets a growing share of the requests for {self.slow_start_s:g} s"
