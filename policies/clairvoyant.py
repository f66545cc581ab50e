"""What could be had by knowing everything but the future: each request's length, and its acceptance on each replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from backends.simulator.script import Script
from backends.speculation import Method
from policies.prior import StepCost, expected_step
from policies.replay_request import ReplayRequest

if TYPE_CHECKING:  # a fleet is compiled; who only names the class need not load a compiler
    from backends.simulator.fleet import Fleet


class Spec(Protocol):
    """What it must know of a replica; see `policies.replay.ReplicaSpec`."""

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


class Clairvoyant:
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
        self._running: list[dict[int, tuple[float, float]]] = [{} for _ in pool]
        self._next_id = 0

    def choose(self, request: ReplayRequest, places: Sequence[int]) -> int:
        """Return the one of these positions of replicas where a request delays everybody least."""
        delays = []
        context = request.prompt_tokens + request.output_tokens / 2
        for place in places:
            cost = self._costs[place]
            steps = self._steps(place, request)
            mine_s = cost.per_request_s + cost.per_context_token_s * context
            prefill_s = cost.per_prompt_token_s * request.prompt_tokens
            running = self._running[place]
            delay = steps * (cost.base_s + mine_s) + prefill_s * (1 + len(running))
            if running:
                left, theirs_s = np.array(list(running.values())).T
                left = np.maximum(1.0, left - self._fleet.replicas[place].steps)
                delay += float(((theirs_s + mine_s) * np.minimum(steps, left)).sum())
            delays.append(delay)
        return places[int(np.argmin(delays))]

    def sent(self, place: int, identity: int, request: ReplayRequest) -> None:
        """Note that a request was sent to a replica, under the id that the fleet gave it."""
        cost = self._costs[place]
        context = request.prompt_tokens + request.output_tokens / 2
        last = self._fleet.replicas[place].steps + self._steps(place, request)
        self._running[place][identity] = (last, cost.per_request_s + cost.per_context_token_s * context)
        self._next_id = identity + 1

    def end(self, place: int, identity: int) -> None:
        """Note that a request has ended."""
        self._running[place].pop(identity, None)

    def _steps(self, place: int, request: ReplayRequest) -> int:
        one = self._pool[place]
        script = request.script(one.method, self._k[place], one.config)
        if script is None:
            features = request.features
            script = self._fleet.script(
                self._next_id, place, request.output_tokens, features.workload or "chat", features.temperature
            )
        return steps_of(script)


def steps_of(script: Script) -> int:
    """Return how many steps a script takes."""
    emitted = script.emitted.tolist()
    at = steps = 0
    while at < len(emitted):
        at += emitted[at]
        steps += 1
    return steps
