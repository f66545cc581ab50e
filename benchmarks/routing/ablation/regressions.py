"""What a user would try first: a regression of the time to finish on each replica, or a linear contextual bandit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from backends.backend import Candidate
from policies.features.request import RequestFeatures
from policies.policy import Decision, Outcome, Policy, PolicySettings
from policies.roles import Learner

Floats = npt.NDArray[np.float64]

KINDS = ("chat", "code", "math", "summarization")
EVERY, LATEST = 100, 4000
"""Answers between two fits, and how many of the latest a fit is made of."""

EXPLORED = 0.02
"""Share of the requests of the regressions that go to a random replica."""


class Seen(NamedTuple):
    """An answer: its replica, the features of its request and of the load that it met, and the log of its time."""

    backend: str
    features: Floats
    log_s: float


class Model(Protocol):
    """The time to finish on one replica."""

    def fit(self, features: Floats, log_s: Floats) -> object:
        """Fit to answers, shapes (answers, features) and (answers,)."""

    def score(self, features: Floats) -> float:
        """Return the expected log of the seconds, shape (features,)."""


class PerReplica(Policy, Learner):
    """One model for each replica; the request goes where it is expected to finish first.

    It begins with answers that random choices gave, and goes on learning.
    """

    def __init__(self, name: str, make: Callable[[], Model], begin: Sequence[Seen], seed: int) -> None:
        super().__init__(PolicySettings())
        self.name = name
        self.seen = list(begin)
        self._make = make
        self._models: dict[str, Model] = {}
        self._rng = Random(seed)
        if begin:
            self._fit()

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Choose the candidate with the least expected time; at random where nothing is known."""
        rows = [features_of(request, candidate) for candidate in candidates]
        if not self._models or self._rng.random() < EXPLORED:
            index = self._rng.randrange(len(candidates))
        else:
            scores = [self._models[candidate.name].score(row) for candidate, row in zip(candidates, rows, strict=True)]
            index = scores.index(min(scores))
        return Decision(candidates[index].name, self.name, "least_predicted", memo=rows[index])

    def observe(self, outcome: Outcome) -> None:
        """Keep the answer; fit again after every `EVERY` answers."""
        if outcome.status != 200 or outcome.e2e_s is None:
            return
        self.seen.append(Seen(outcome.decision.backend, outcome.decision.memo, math.log(outcome.e2e_s)))
        if self._models and len(self.seen) % EVERY == 0:
            self._fit()

    def _fit(self) -> None:
        latest = self.seen[-LATEST:]
        for backend in {one.backend for one in latest}:
            rows = [one for one in latest if one.backend == backend]
            model = self._models[backend] = self._make()
            model.fit(np.array([one.features for one in rows]), np.array([one.log_s for one in rows]))


class Fitted:
    """A regression of scikit-learn."""

    def __init__(self, regression: Any) -> None:
        self._regression = regression

    def fit(self, features: Floats, log_s: Floats) -> object:
        """Fit to answers."""
        return self._regression.fit(features, log_s)

    def score(self, features: Floats) -> float:
        """Return the expected log of the seconds."""
        return float(self._regression.predict(features[None, :])[0])


def bayesian_ridge() -> Model:
    """Return `BayesianRidge` with scaled features."""
    from sklearn.linear_model import BayesianRidge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return Fitted(make_pipeline(StandardScaler(), BayesianRidge()))


def boosted_trees() -> Model:
    """Return `HistGradientBoostingRegressor` with leaves for some hundred answers."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    return Fitted(HistGradientBoostingRegressor(max_iter=60, min_samples_leaf=10))


class Bandit:
    """LinUCB of one replica: ridge regression, less the width of its confidence.

    References
    ----------
    .. [1] Li, Chu, Langford and Schapire, "A Contextual-Bandit Approach to Personalized News Article Recommendation",
       WWW 2010.
    """

    def fit(self, features: Floats, log_s: Floats) -> object:
        """Fit to answers."""
        self._inverse = np.linalg.inv(features.T @ features + np.eye(features.shape[1]))
        self._weights = self._inverse @ features.T @ log_s
        return self

    def score(self, features: Floats) -> float:
        """Return the lower bound of the log of the seconds."""
        return float(features @ self._weights - WIDTH * math.sqrt(features @ self._inverse @ features))


WIDTH = 0.5
"""Standard deviations of log seconds between similar requests."""


def features_of(request: RequestFeatures, candidate: Candidate) -> Floats:
    """Return what is known of a request and of a replica's load."""
    load, limit = candidate.load, request.max_tokens
    numbers = [
        1.0,
        candidate.in_flight / 10,
        math.log1p(candidate.in_flight),
        load.running / 10,
        load.waiting / 10,
        load.kv_usage,
        request.prompt_tokens / 1000,
        math.log1p(request.prompt_tokens),
        request.overlap,
        request.code_share,
        request.temperature,
        float(request.turns > 1),
        0.0 if limit is None else math.log(limit),
        float(request.structured),
    ]
    clients = [float(request.template == f"{kind}-{number}") for kind in KINDS for number in range(5)]
    return np.array(numbers + [float(request.workload == kind) for kind in KINDS] + clients)
