"""Choices weighed in the fluid pool: by prediction, or by any policy; and what there was to choose between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from backends.backend import Candidate
from policies.distill.fluid import FluidBackend, Job, Kind, fluid_pool, play
from policies.learned.cost import Cost
from policies.learned.models.backend_model import FittedModels
from policies.learned.models.buckets import TEMPLATE, WORKLOAD, Key
from policies.learned.predict import Predictor
from policies.load import LoadMeter
from policies.policy import Policy

Floats = npt.NDArray[np.float64]

_MORE = 4
"""Requests more on a backend, for what each of them adds to its cost."""

_AT_A_TIME = 2


@dataclass(frozen=True, slots=True)
class Situations:
    """What there was to choose between, request by request.

    Parameters
    ----------
    keys
        Of the requests.
    requests
        There on each backend, per unit of its weight; shape (situations, backends).
    idle_s, each_s
        Cost of the request on each backend with nobody there, and by how much it rises with each request there; the
        same shape. That is exact where a cost is linear in the requests, as that of the latency is, and elsewhere the
        line through what it is at the requests that were there.
    weights
        Shape (situations,).
    """

    keys: tuple[Key, ...]
    requests: Floats
    idle_s: Floats
    each_s: Floats
    weights: Floats

    @property
    def costs_s(self) -> Floats:
        """Cost of each backend in each situation; shape (situations, backends)."""
        return self.idle_s + self.each_s * self.requests

    def with_undeclared(self, weight: float) -> Situations:
        """Return these, and after them the same with nothing declared, at `weight` times the weight.

        Rules that were made from requests which declare their workload must do something sensible with others.
        """
        bare = []
        for key in self.keys:
            fields = list(key)
            fields[WORKLOAD] = fields[TEMPLATE] = ""
            bare.append(tuple(fields))
        requests, idle_s, each_s = (np.vstack([one, one]) for one in (self.requests, self.idle_s, self.each_s))
        weights = np.concatenate([self.weights, weight * self.weights])
        return Situations((*self.keys, *bare), requests, idle_s, each_s, weights)


@dataclass(slots=True)
class Notes:
    """Situations while they come: at each arrival in a filled pool, what some requests would meet there.

    Parameters
    ----------
    kinds
        Requests of which the next `_AT_A_TIME` are noted each time, in turn, so that all are noted equally often.
    """

    kinds: Sequence[Kind]
    keys: list[Key] = field(default_factory=list)
    requests: list[list[float]] = field(default_factory=list)
    costs: list[list[float]] = field(default_factory=list)
    with_more: list[list[float]] = field(default_factory=list)
    _runs: list[int] = field(default_factory=list)
    _next: int = 0

    def add(self, backends: Sequence[FluidBackend], costs: Callable[[Kind], list[float]]) -> None:
        """Note what the next requests would meet."""
        for _ in range(_AT_A_TIME):
            kind = self.kinds[self._next % len(self.kinds)]
            self._next += 1
            self.keys.append(kind[0])
            self.requests.append([one.in_flight for one in backends])
            self.costs.append(costs(kind))
            for one in backends:
                one.in_flight += _MORE
            self.with_more.append(costs(kind))
            for one in backends:
                one.in_flight -= _MORE

    def end_run(self) -> None:
        """Note that what comes from here on belongs to another run."""
        self._runs.append(len(self.keys))

    def situations(self, backend_weights: Sequence[float]) -> Situations:
        """Return what was noted; each run weighs the same, and in it every second."""
        per_unit = np.array([weight or 1.0 for weight in backend_weights])
        requests, costs = np.array(self.requests), np.array(self.costs)
        each_s = np.maximum(0.0, (np.array(self.with_more) - costs) / _MORE)
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
    """A pool that behaves exactly as was learned.

    Parameters
    ----------
    cost
        What choosing by prediction minimises.
    """

    fitted: FittedModels
    calibration: str
    cost: Cost
    candidates: Sequence[Candidate]

    def predictor(self) -> Predictor:
        """Return one that knows all that was learned, and of no request under way."""
        predictor = Predictor(LoadMeter(), self.calibration)
        predictor.learn(self.fitted)
        return predictor

    def by_policy(self, jobs: Sequence[Job], policy: Policy) -> float:
        """Return mean seconds to finish if a policy chooses."""
        pool = fluid_pool(predictor := self.predictor(), self.candidates)
        places = {backend.name: place for place, backend in enumerate(pool)}

        def choose(job: Job, backends: Sequence[FluidBackend], now_s: float) -> int:
            return places[policy.choose(job.features, backends).backend]

        return play(jobs, predictor, pool, choose, lambda number: None)

    def by_prediction(self, jobs: Sequence[Job], notes: Notes | None = None) -> float:
        """Return mean seconds to finish if each request goes where its cost is least; note the situations."""
        pool = fluid_pool(predictor := self.predictor(), self.candidates)
        shares = []

        def choose(job: Job, backends: Sequence[FluidBackend], now_s: float) -> int:
            if notes is not None and job.left == 1.0:
                notes.add(backends, lambda kind: self._costs(predictor, kind, backends, now_s))
            predictions = predictor.predict(job.features, job.key, backends, now_s)
            costs = [self.cost.of(job.features, one) for one in predictions]
            chosen = min(range(len(costs)), key=costs.__getitem__)
            name, share = backends[chosen].name, predictions[chosen].share
            shares.append((name, share))
            predictor.known[name].backlog.send(share, now_s)
            return chosen

        def end(number: int) -> None:
            name, share = shares[number]
            predictor.known[name].backlog.end(share)

        took_s = play(jobs, predictor, pool, choose, end)
        if notes is not None:
            notes.end_run()
        return took_s

    def _costs(self, predictor: Predictor, kind: Kind, backends: Sequence[FluidBackend], now_s: float) -> list[float]:
        key, features = kind
        return [self.cost.of(features, one) for one in predictor.predict(features, key, backends, now_s)]
