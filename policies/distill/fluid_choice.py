"""Choices in the fluid model of a pool, by prediction or by any policy, and the situations in which they are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from backends.backend import Candidate
from policies.distill.fluid import FluidBackend, Job, Kind, fluid_pool, play
from policies.features.request import RequestFeatures
from policies.learned.cost import Cost
from policies.learned.models.backend_model import FittedModels, Prediction
from policies.learned.models.keys import Key
from policies.learned.predict import Predictor
from policies.load import LoadMeter
from policies.policy import Policy

Floats = npt.NDArray[np.float64]

_EXTRA_REQUESTS = 4
"""Requests added to every backend to measure how its cost rises per request."""

_KINDS_PER_ARRIVAL = 2


@dataclass(frozen=True, slots=True)
class Situations:
    """The alternatives of a series of choices."""

    keys: tuple[Key, ...]  # bucket key of each request
    requests: Floats  # requests on each backend per unit of its weight; shape (situations, backends)
    idle_s: Floats  # cost of the request on each backend if it is idle, in seconds; the same shape
    # Increase of that cost per request on the backend; the same shape. For an objective whose cost is not linear in the
    # requests (only latency is), `idle_s` and `each_s` describe the tangent at `requests`.
    each_s: Floats
    weights: Floats  # weight of each situation; shape (situations,)

    @property
    def costs_s(self) -> Floats:
        """Cost of each backend in each situation, in seconds; shape (situations, backends)."""
        return self.idle_s + self.each_s * self.requests


@dataclass(slots=True)
class SituationLog:
    """A log of situations: at each arrival, the alternatives that some requests would have in the pool."""

    # Requests to log. They take turns, `_KINDS_PER_ARRIVAL` at each arrival, so all are logged equally often.
    kinds: Sequence[Kind]
    keys: list[Key] = field(default_factory=list)
    requests: list[list[float]] = field(default_factory=list)
    costs: list[list[float]] = field(default_factory=list)
    costs_with_extra: list[list[float]] = field(default_factory=list)
    _runs: list[int] = field(default_factory=list)
    _next: int = 0

    def add(self, backends: Sequence[FluidBackend], costs: Callable[[Kind], list[float]]) -> None:
        """Log the alternatives of the next requests."""
        for _ in range(_KINDS_PER_ARRIVAL):
            kind = self.kinds[self._next % len(self.kinds)]
            self._next += 1
            self.keys.append(kind[0])
            self.requests.append([backend.in_flight for backend in backends])
            self.costs.append(costs(kind))
            for backend in backends:
                backend.in_flight += _EXTRA_REQUESTS
            self.costs_with_extra.append(costs(kind))
            for backend in backends:
                backend.in_flight -= _EXTRA_REQUESTS

    def end_run(self) -> None:
        """End a run; later situations belong to the next one."""
        self._runs.append(len(self.keys))

    def situations(self, backend_weights: Sequence[float]) -> Situations:
        """Return the logged situations; each run has the same total weight, spread evenly over its cost."""
        per_unit = np.array([weight or 1.0 for weight in backend_weights])
        requests, costs = np.array(self.requests), np.array(self.costs)
        each_s = np.maximum(0.0, (np.array(self.costs_with_extra) - costs) / _EXTRA_REQUESTS)
        weights = np.concatenate(
            [np.full(end - begin, 1.0 / costs[begin:end].sum()) for begin, end in pairwise([0, *self._runs])]
        )
        return Situations(
            tuple(self.keys),
            requests / per_unit,
            np.maximum(0.0, costs - each_s * requests),
            each_s * per_unit,
            weights,
        )


@dataclass(frozen=True, slots=True)
class FluidChoice:
    """A fluid model of a pool, in which choices can be compared."""

    fitted: FittedModels
    calibration: str
    cost: Cost  # cost that a choice by prediction minimises
    candidates: Sequence[Candidate]

    def predictor(self) -> Predictor:
        """Return a predictor with the fitted models and no requests in flight."""
        predictor = Predictor(LoadMeter(), self.calibration)
        predictor.learn(self.fitted)
        return predictor

    def by_policy(self, jobs: Sequence[Job], policy: Policy) -> float:
        """Return the mean seconds to finish if a policy chooses."""
        pool = fluid_pool(predictor := self.predictor(), self.candidates)
        index_of = {backend.name: index for index, backend in enumerate(pool)}

        def choose(job: Job, backends: Sequence[FluidBackend], now_s: float) -> int:
            return index_of[policy.choose(job.features, backends).backend]

        return play(jobs, predictor, pool, choose, lambda number: None)

    def by_prediction(self, jobs: Sequence[Job], log: SituationLog | None = None) -> float:
        """Return the mean seconds to finish if each request goes where its cost is lowest, logging the situations."""
        pool = fluid_pool(predictor := self.predictor(), self.candidates)
        sent = []

        def choose(job: Job, backends: Sequence[FluidBackend], now_s: float) -> int:
            if log is not None and job.left == 1.0:
                log.add(backends, lambda kind: self._costs(kind[1], predictor.predict(kind[1], kind[0], backends)))
            predictions = predictor.predict(job.features, job.key, backends)
            costs = self._costs(job.features, predictions)
            chosen = min(range(len(costs)), key=costs.__getitem__)
            name, prediction = backends[chosen].name, predictions[chosen]
            sent.append((name, prediction))
            predictor.backend_models[name].backlog.send(prediction, now_s)
            return chosen

        def end(number: int) -> None:
            name, prediction = sent[number]
            predictor.backend_models[name].backlog.end(prediction)

        mean_s = play(jobs, predictor, pool, choose, end)
        if log is not None:
            log.end_run()
        return mean_s

    def _costs(self, request: RequestFeatures, predictions: list[Prediction]) -> list[float]:
        costs, self.cost.mean_urgency = self.cost.of(request, predictions)
        return costs
