"""Policies for comparison only: a greedy one, and a regression in the manner of another router."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np

from backends.backend import Candidate
from policies.features.request import RequestFeatures
from policies.learned.cost import Cost
from policies.learned.models.backend_model import Prediction
from policies.learned.policy import Learned, LearnedSettings
from policies.policy import Decision, Outcome, Policy, PolicySettings


class OwnTime(Cost):
    """The predicted time of the request itself, without the delay of others."""

    def of(self, request: RequestFeatures, predictions: list[Prediction]) -> tuple[list[float], float]:
        return [prediction.own_s for prediction in predictions], 0.0


class Greedy(Learned):
    """`learned`, except that each request goes where it is fastest itself."""

    name = "greedy"

    def __init__(self, settings: LearnedSettings) -> None:
        super().__init__(settings)
        self.cost = OwnTime()
        self._assemble()


class LatencyRegression(Policy):
    """One linear regression of TTFT and TPOT on queue, KV use and prompt length, for all backends together.

    Modelled on llm-d's predicted-latency scorer, which uses gradient-boosted trees on the same features. Like it, this
    policy cannot represent that backends differ in more than their load.
    """

    name = "latency_regression"

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings)
        self._met: dict[int, np.ndarray[Any, Any]] = {}
        self._x: list[np.ndarray[Any, Any]] = []
        self._y: list[tuple[float, float]] = []
        self._weights = np.zeros((6, 2))
        self._rng = Random(0)

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Choose the candidate with the lowest predicted latency."""
        x = np.array(
            [
                (
                    1.0,
                    candidate.in_flight,
                    candidate.load.running,
                    candidate.load.waiting,
                    candidate.load.kv_usage,
                    request.prompt_tokens * 1e-3,
                )
                for candidate in candidates
            ]
        )
        predicted = x @ self._weights
        tokens = min(request.max_tokens or 200, 200)
        latency_s = predicted[:, 0] + tokens * predicted[:, 1]
        order = latency_s if self._y else np.array([candidate.in_flight for candidate in candidates])
        best = np.flatnonzero(order <= order.min() + 1e-12)
        index = int(best[self._rng.randrange(len(best))])
        return Decision(candidates[index].name, self.name, "least_predicted", memo=x[index])

    def observe(self, outcome: Outcome) -> None:
        """Store the outcome; refit every 50 requests, on the last 2,000."""
        if outcome.ttft_s is None or outcome.tpot_s is None or not isinstance(outcome.decision.memo, np.ndarray):
            return
        self._x.append(outcome.decision.memo)
        self._y.append((outcome.ttft_s, outcome.tpot_s))
        if len(self._y) % 50 == 0:
            x, y = np.array(self._x[-2000:]), np.array(self._y[-2000:])
            self._weights = np.linalg.solve(x.T @ x + 1e-3 * np.eye(x.shape[1]), x.T @ y)
