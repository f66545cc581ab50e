"""An oracle that knows each request's length and its acceptance on each replica, but no future arrivals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from backends.simulator.engine.state import DRAWN, EXCLUDED
from backends.speculation import Method
from lab.simulation.replica_spec import ReplicaSpec
from lab.simulation.request import LONGEST, ReplayRequest
from policies.learned.depth import between, depth_of
from policies.learned.prior import expected_step
from policies.learned.shadow_drafting import steps_of

if TYPE_CHECKING:  # importing it compiles code
    from backends.simulator.engine.fleet import Fleet


class Oracle:
    """Chooses the replica that least delays the request and those in flight in total, using true step counts.

    It is no bound: it does not know future arrivals, and another objective may do better.
    """

    def __init__(self, pool: Sequence[ReplicaSpec], fleet: Fleet, requests: int) -> None:
        self._fleet = fleet  # an idle fleet of `pool`'s replicas, whose ids start at 0
        self._pool = pool
        self._speculating = [number for number, one in enumerate(pool) if one.method is not Method.BASELINE]
        self._depths = [depth_of(replica.draft_schedule) for replica in fleet.replicas]
        self._k = [replica.num_speculative_tokens for replica in fleet.replicas]
        self._costs = np.array(
            [expected_step(one.calibration, one.method, k) for one, k in zip(pool, self._k, strict=True)]
        )
        self._only_baselines = np.array([DRAWN if one.method is Method.BASELINE else EXCLUDED for one in pool])
        self._steps = np.zeros(len(pool), np.int64)
        self._last_steps = np.zeros(requests, np.int64)  # by id

    def choose(self, request: ReplayRequest) -> int:
        """Return the index of the replica with the least total delay."""
        if request.output_tokens > LONGEST:
            return 0  # which rejects it, as all do
        steps, features = self._steps, request.features
        if features.baseline_only:
            steps[:] = self._only_baselines
        else:
            steps[:] = DRAWN
            for number in self._speculating:
                taken = self._steps_on(number, request)
                if taken is not None:
                    steps[number] = taken
        return self._fleet.least_delay(
            request.prompt_tokens,
            request.output_tokens,
            features.workload or "chat",
            features.temperature,
            self._costs,
            steps,
            self._last_steps,
        )

    def _steps_on(self, number: int, request: ReplayRequest) -> int | None:
        """Return the steps on a replica; with a schedule, at the k of its current batch, and set that k's cost.

        None if the steps must be drawn, with the maximum k.
        """
        one, depth = self._pool[number], self._depths[number]
        if depth is None:
            return _steps(request, one, self._k[number])
        place = depth.place(self._fleet.replicas[number].in_flight + 1)
        levels = depth.levels[place[0] : place[0] + 2]
        costs = [expected_step(one.calibration, one.method, k, most_k=self._k[number]) for k in levels]
        here = (0, place[1])
        self._costs[number] = [between(column, here) for column in zip(*costs, strict=True)]
        low, high = (_steps(request, one, k) for k in levels)
        if low is None or high is None:
            return None
        return round(1.0 / between((1.0 / low, 1.0 / high), here))

    def sent(self, replica: int, request_id: int) -> None:
        """Register the request of the last choice as sent to a replica."""
        self._last_steps[request_id] = self._fleet.replicas[replica].steps + self._steps[replica]


def _steps(request: ReplayRequest, one: ReplicaSpec, k: int) -> int | None:
    """Return the steps of a request on a replica that always drafts k tokens; None if they must be drawn."""
    if k == 0:
        return request.output_tokens
    script = request.script(one.method, k, one.config)
    return None if script is None else steps_of(script.emitted)
