"""An oracle that knows each request's length and its acceptance on each replica, but no future arrivals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from backends.simulator.engine.state import DRAWN, EXCLUDED
from backends.speculation import Method
from lab.replay.request import ReplayRequest
from policies.learned.models.prior import expected_step
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

    Parameters
    ----------
    fleet
        An idle fleet of the replicas of `pool`, whose ids begin at 0.
    requests
        Number of requests that it will choose for.
    """

    def __init__(self, pool: Sequence[Spec], fleet: Fleet, requests: int) -> None:
        self._fleet = fleet
        k_of = [replica.num_speculative_tokens for replica in fleet.replicas]
        self._costs = np.array(
            [expected_step(one.calibration, one.method, k) for one, k in zip(pool, k_of, strict=True)]
        )
        self._speculating = [
            (number, one.method, k, one.config)
            for number, (one, k) in enumerate(zip(pool, k_of, strict=True))
            if one.method is not Method.BASELINE
        ]
        self._only_baselines = np.array([DRAWN if one.method is Method.BASELINE else EXCLUDED for one in pool])
        self._steps = np.zeros(len(pool), np.int64)
        self._last_steps = np.zeros(requests, np.int64)  # by id

    def choose(self, request: ReplayRequest) -> int:
        """Return the index of the replica with the least total delay."""
        steps, features = self._steps, request.features
        if features.baseline_only:
            steps[:] = self._only_baselines
        else:
            steps[:] = DRAWN
            for number, method, k, config in self._speculating:
                script = request.script(method, k, config)
                if script is not None:
                    steps[number] = steps_of(script.emitted)
        return self._fleet.least_delay(
            request.prompt_tokens,
            request.output_tokens,
            features.workload or "chat",
            features.temperature,
            self._costs,
            steps,
            self._last_steps,
        )

    def sent(self, replica: int, request_id: int) -> None:
        """Register the request of the last choice, which was sent to that replica."""
        self._last_steps[request_id] = self._fleet.replicas[replica].steps + self._steps[replica]
