"""An oracle that knows each request's length and its acceptance on each replica, but no future arrivals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from backends.speculation import Method
from lab.replay.request import ReplayRequest
from policies.learned.models.prior import StepCost, expected_step
from policies.learned.shadow_drafting import steps_of

if TYPE_CHECKING:  # importing it compiles code
    from backends.simulator.engine.fleet import Fleet


class Spec(Protocol):
    """The attributes of `lab.replay.simulate.ReplicaSpec` that the oracle uses."""

    @property
    def method(self) -> Method:
        """Speculation method."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """Speculative config."""
        ...

    @property
    def calibration(self) -> str:
        """Name of the calibration."""
        ...


class Oracle:
    """Chooses the replica with the least total delay, to the request and to those in flight, using true step counts.

    It is not a bound: it does not know future arrivals, and another objective may do better.
    """

    def __init__(self, pool: Sequence[Spec], fleet: Fleet) -> None:
        self._pool = pool
        self._fleet = fleet
        self._k = [replica.num_speculative_tokens for replica in fleet.replicas]
        self._costs: list[StepCost] = [
            expected_step(one.calibration, one.method, k) for one, k in zip(pool, self._k, strict=True)
        ]
        self._running = [_Running() for _ in pool]

    def choose(self, request: ReplayRequest, replicas: Sequence[int]) -> tuple[int, int]:
        """Return the replica (among these indices) with the least total delay, and the request's steps there."""
        best = replicas[0], 0
        least_s = float("inf")
        context = request.prompt_tokens + request.output_tokens / 2
        for replica in replicas:
            cost, running = self._costs[replica], self._running[replica]
            steps = self._steps(replica, request)
            own_s = cost.per_request_s + cost.per_context_token_s * context
            prefill_s = cost.per_prompt_token_s * request.prompt_tokens
            delay_s = steps * (cost.base_s + own_s) + prefill_s * (1 + running.count)
            if running.count:
                delay_s += running.shared_s(own_s, steps, self._fleet.replicas[replica].steps)
            if delay_s < least_s:
                best, least_s = (replica, steps), delay_s
        return best

    def sent(self, replica: int, request_id: int, request: ReplayRequest, steps: int) -> None:
        """Register a request of `steps` steps that was sent to a replica."""
        cost = self._costs[replica]
        context = request.prompt_tokens + request.output_tokens / 2
        last = self._fleet.replicas[replica].steps + steps
        self._running[replica].add(request_id, last, cost.per_request_s + cost.per_context_token_s * context)

    def end(self, replica: int, request_id: int) -> None:
        """Remove a request that has ended."""
        self._running[replica].remove(request_id)

    def _steps(self, replica: int, request: ReplayRequest) -> int:
        one = self._pool[replica]
        if one.method is Method.BASELINE:
            return request.output_tokens
        script = request.script(one.method, self._k[replica], one.config)
        if script is not None:
            return steps_of(script.emitted)
        features = request.features
        return self._fleet.next_steps(replica, request.output_tokens, features.workload or "chat", features.temperature)


class _Running:
    """The requests on one replica: the step at which each ends, and the seconds it adds to a step."""

    def __init__(self) -> None:
        self.count = 0
        self._ids: list[int] = []
        self._slots: dict[int, int] = {}
        self._last = np.zeros(64)
        self._adds_s = np.zeros(64)

    def add(self, request_id: int, last: int, adds_s: float) -> None:
        slot = self.count
        if slot == len(self._last):
            self._last = np.concatenate([self._last, np.zeros_like(self._last)])
            self._adds_s = np.concatenate([self._adds_s, np.zeros_like(self._adds_s)])
        self._last[slot], self._adds_s[slot], self._slots[request_id] = last, adds_s, slot
        self._ids.append(request_id)
        self.count = slot + 1

    def remove(self, request_id: int) -> None:
        slot = self._slots.pop(request_id)
        self.count -= 1
        moved = self._ids.pop()
        if slot < self.count:  # move the last request into the free slot
            self._last[slot], self._adds_s[slot] = self._last[self.count], self._adds_s[self.count]
            self._ids[slot], self._slots[moved] = moved, slot

    def shared_s(self, own_s: float, steps: int, now: int) -> float:
        """Return the delay of the steps shared with one more request: theirs to it, and its to them."""
        left = np.maximum(1.0, self._last[: self.count] - now)
        return float((self._adds_s[: self.count] + own_s) @ np.minimum(steps, left))
