"""What could be had by knowing everything but the future: each request's length, and its acceptance on each replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from backends.speculation import Method
from lab.replay.request import ReplayRequest
from policies.learned.models.prior import StepCost, expected_step
from policies.learned.shadow_drafting import steps_of

if TYPE_CHECKING:  # a fleet is compiled; who only names the class need not load a compiler
    from backends.simulator.engine.fleet import Fleet


class Spec(Protocol):
    """What it must know of a replica; see `lab.replay.simulate.ReplicaSpec`."""

    @property
    def method(self) -> Method:
        """How it speculates."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """Its speculative config."""
        ...

    @property
    def calibration(self) -> str:
        """Name of its step times."""
        ...


class Oracle:
    """Chooses the least delay to everybody, itself and those already there, with true steps in place of predictions.

    It is no bound: it does not know who comes next, and another objective may do better.
    """

    def __init__(self, pool: Sequence[Spec], fleet: Fleet) -> None:
        self._pool = pool
        self._fleet = fleet
        self._k = [replica.num_speculative_tokens for replica in fleet.replicas]
        self._costs: list[StepCost] = [
            expected_step(one.calibration, one.method, k) for one, k in zip(pool, self._k, strict=True)
        ]
        self._running = [_Running() for _ in pool]

    def choose(self, request: ReplayRequest, places: Sequence[int]) -> tuple[int, int]:
        """Return the one of these positions of replicas where a request delays everybody least, and its steps there."""
        best = places[0], 0
        least_s = float("inf")
        context = request.prompt_tokens + request.output_tokens / 2
        for place in places:
            cost, running = self._costs[place], self._running[place]
            steps = self._steps(place, request)
            mine_s = cost.per_request_s + cost.per_context_token_s * context
            prefill_s = cost.per_prompt_token_s * request.prompt_tokens
            delay_s = steps * (cost.base_s + mine_s) + prefill_s * (1 + running.count)
            if running.count:
                delay_s += running.shared_s(mine_s, steps, self._fleet.replicas[place].steps)
            if delay_s < least_s:
                best, least_s = (place, steps), delay_s
        return best

    def sent(self, place: int, identity: int, request: ReplayRequest, steps: int) -> None:
        """Note that a request that takes so many steps was sent to a replica, under the id that the fleet gave it."""
        cost = self._costs[place]
        context = request.prompt_tokens + request.output_tokens / 2
        last = self._fleet.replicas[place].steps + steps
        self._running[place].add(identity, last, cost.per_request_s + cost.per_context_token_s * context)

    def end(self, place: int, identity: int) -> None:
        """Note that a request has ended."""
        self._running[place].remove(identity)

    def _steps(self, place: int, request: ReplayRequest) -> int:
        one = self._pool[place]
        if one.method is Method.BASELINE:
            return request.output_tokens
        script = request.script(one.method, self._k[place], one.config)
        if script is not None:
            return steps_of(script.emitted)
        features = request.features
        return self._fleet.next_steps(place, request.output_tokens, features.workload or "chat", features.temperature)


class _Running:
    """The requests on one replica: at which of its steps each ends, and what it adds to a step, in seconds."""

    def __init__(self) -> None:
        self.count = 0
        self._ids: list[int] = []
        self._slots: dict[int, int] = {}
        self._last = np.zeros(64)
        self._adds_s = np.zeros(64)

    def add(self, identity: int, last: int, adds_s: float) -> None:
        slot = self.count
        if slot == len(self._last):
            self._last = np.concatenate([self._last, np.zeros_like(self._last)])
            self._adds_s = np.concatenate([self._adds_s, np.zeros_like(self._adds_s)])
        self._last[slot], self._adds_s[slot], self._slots[identity] = last, adds_s, slot
        self._ids.append(identity)
        self.count = slot + 1

    def remove(self, identity: int) -> None:
        slot = self._slots.pop(identity)
        self.count -= 1
        moved = self._ids.pop()
        if slot < self.count:  # the last one takes the place that is free
            self._last[slot], self._adds_s[slot] = self._last[self.count], self._adds_s[self.count]
            self._ids[slot], self._slots[moved] = moved, slot

    def shared_s(self, mine_s: float, steps: int, now: int) -> float:
        """Return the delay of the steps that all of them share with one more: theirs to it, and its to them."""
        left = np.maximum(1.0, self._last[: self.count] - now)
        return float((self._adds_s[: self.count] + mine_s) @ np.minimum(steps, left))
