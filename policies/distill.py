"""Rules from experience: what `learned` knows, as rules that a person can read and `thresholds` can run.

Requests are drawn from the cells of what was seen, and sent at several loads through a pool that behaves exactly as was
learned (`policies.fluid`). There the choice by prediction, `least_loaded` and the rules can be compared, so the rules
come with the share of the gain that they keep, by the same predictions that they were made from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np
import yaml

from backends.backend import Candidate
from policies.acceptance import arm_of
from policies.cells import (
    LIMIT,
    LIMITS,
    OVERLAP,
    OVERLAPS,
    PROMPT,
    PROMPT_TOKENS,
    SHAPE,
    TEMPERATURE,
    TEMPERATURES,
    TEMPLATE,
    TURNS,
    WORKLOAD,
    Key,
)
from policies.fixed import LeastLoaded, LoadSettings
from policies.fluid import FluidBackend, Job, fluid_pool, play
from policies.learned import Learned
from policies.length import LENGTH
from policies.length import NOISE as LENGTH_NOISE
from policies.load import LoadMeter
from policies.objective import Cost
from policies.policy import Policy
from policies.predict import Knowledge, Predictor
from policies.request import Endpoint, RequestFeatures
from policies.rule_tree import Floats, Leaf, columns_of, grow, row_of, shortened
from policies.rules import BACKEND
from policies.thresholds import Spill, Thresholds, ThresholdSettings

LEVELS = (1.0, 4.0, 12.0, 32.0)
"""Requests in flight per backend, if spread evenly, at which the choices are compared."""

MOST_LEAVES = 12
_JOBS = 240
_SPILLS = tuple((slack, ratio) for ratio in (1.25, 1.0, 1.6) for slack in (8.0, 2.0, 4.0, 16.0))
"""Slack and ratio; the first is what trees are compared with."""

_LENGTHS = (1, 2, 99)
"""How many entries a rule may prefer before the least loaded backend of all is taken."""

_ROUNDS = 2
_LEAST_GAIN = 0.002


class NothingLearnedError(Exception):
    """There is nothing yet that rules could be made of."""


@dataclass(frozen=True, slots=True)
class Distilled:
    """Rules, and what they are worth.

    Parameters
    ----------
    learned_gain, rules_gain
        By how much mean time to finish is below that of `least_loaded`, as the mean over the levels: choosing by
        prediction, and by the rules.
    default_gain
        The same by the rules that come with the gateway.
    requests
        Observed, weighed by age, that this is made of.
    """

    settings: ThresholdSettings
    leaves: tuple[Leaf, ...]
    learned_gain: float
    rules_gain: float
    default_gain: float
    requests: float

    @property
    def kept_share(self) -> float | None:
        """Share of the gain over `least_loaded` that the rules keep; None where there is next to none to keep."""
        return self.rules_gain / self.learned_gain if self.learned_gain > _LEAST_GAIN else None

    @property
    def text(self) -> str:
        """The rules as they stand under `policy:` in a pool file, with what they are worth."""
        kept = "there is next to nothing to gain" if self.kept_share is None else f"{self.kept_share:.0%} of that gain"
        lines = [
            f"# From {self.requests:.0f} requests. Mean time to finish against least_loaded, by what was learned:",
            f"# the prediction {-self.learned_gain:+.1%}, these rules {-self.rules_gain:+.1%} ({kept}),",
            f"# the default rules {-self.default_gain:+.1%}.",
            "name: thresholds",
            f"spill: {{slack: {self.settings.spill.slack:g}, ratio: {self.settings.spill.ratio:g}}}",
            "rules:",
        ]
        for leaf in self.leaves:
            costs = ", ".join(f"{target} {cost:.2f}" for target, cost in zip(leaf.prefer, leaf.costs, strict=True))
            lines.append(f"  # {leaf.share:.0%} of the requests; delay relative to the mean: {costs}")
            lines.append(f"  - name: {leaf.name}")
            if leaf.when:
                lines.append(f"    when: {_flow(leaf.when)}")
            lines.append(f"    prefer: {_flow(list(leaf.prefer))}")
        return "\n".join(lines) + "\n"


def distill(
    policy: Learned, candidates: Sequence[Candidate], *, levels: Sequence[float] = LEVELS, seed: int = 0
) -> Distilled:
    """Turn what a policy has learned into rules; takes seconds, in any thread, and changes nothing.

    Parameters
    ----------
    candidates
        The backends that requests may go to.
    levels
        Requests in flight per backend at which choices are compared.

    Raises
    ------
    NothingLearnedError
        If no request was observed yet, or there are not two backends to choose between.
    """
    if len(candidates) < 2:
        raise NothingLearnedError("there are no two backends to choose between")
    cells = policy.experience.cells(LENGTH)
    if not cells:
        raise NothingLearnedError("no request was observed yet")
    priors = {one.name: Predictor(LoadMeter(), policy.settings.calibration).of(one).prior for one in candidates}
    bench = _Bench(
        policy.fitted(priors),
        policy.settings.calibration,
        policy.cost,
        list(candidates),
        {key: sums[0] for key, sums in cells.items()},
        seed,
    )
    return bench.distill(levels)


class _Tried(NamedTuple):
    gain: float
    settings: ThresholdSettings
    leaves: list[Leaf]


def _by_gain(one: _Tried) -> float:
    return one.gain


def _settings(leaves: Sequence[Leaf], slack: float, ratio: float) -> ThresholdSettings:
    rules = [{"name": leaf.name, "when": leaf.when, "prefer": leaf.prefer} for leaf in leaves]
    return ThresholdSettings.model_validate({"rules": rules, "spill": Spill(slack=slack, ratio=ratio), "seed": 0})


class _Bench:
    """The pool that behaves as was learned, and the traffic that is like what was seen."""

    def __init__(
        self,
        knowledge: Knowledge,
        calibration: str,
        cost: Cost,
        candidates: list[Candidate],
        counts: dict[Key, float],
        seed: int,
    ) -> None:
        self.knowledge, self.calibration, self.cost, self.candidates = knowledge, calibration, cost, candidates
        self.requests = sum(counts.values())
        self.rng = Random(seed)
        self.keys = self.rng.choices(list(counts), list(counts.values()), k=_JOBS)
        self.features = [_representative(key, self.rng) for key in self.keys]
        effects = knowledge.length.effects
        self.noise = LENGTH_NOISE if effects is None else effects.noise
        self.targets = _targets(candidates)
        self.rows: list[tuple[Key, float]] = []
        self.costs: list[list[float]] = []

    def distill(self, levels: Sequence[float]) -> Distilled:
        plays = [self.jobs(level) for level in levels]
        least = [self.played(jobs, LeastLoaded(LoadSettings(seed=0))) for jobs in plays]
        for jobs in plays:
            self.played_by_prediction(jobs)
        met = len(self.rows)
        for level in levels:
            self.add_even(level)

        def tried(leaves: list[Leaf], spills: Sequence[tuple[float, float]]) -> list[_Tried]:
            return [
                _Tried(_gain(least, [self.played(jobs, Thresholds(settings)) for jobs in plays]), settings, leaves)
                for settings in (_settings(leaves, *spill) for spill in spills)
            ]

        trees = [self.leaves(slice(0, met)), self.leaves(slice(met, None)), self.leaves(slice(None))]
        best = max((one for leaves in trees for one in tried(leaves, _SPILLS[:1])), key=_by_gain)
        best = max((one for length in _LENGTHS for one in tried(shortened(best.leaves, length), _SPILLS)), key=_by_gain)
        for _ in range(_ROUNDS):
            # What rules meet is not what choosing by prediction meets: they leave more on the backends they prefer.
            for jobs in plays:
                self.played(jobs, Thresholds(best.settings), notes=True)
            leaves = self.leaves(slice(-sum(map(len, plays)), None))
            again = self.leaves(slice(0, None))
            spill, length = best.settings.spill, max(len(leaf.prefer) for leaf in best.leaves)
            best = max(
                best,
                *(
                    one
                    for new in (leaves, again)
                    for one in tried(shortened(new, length), [(spill.slack, spill.ratio)])
                ),
                key=_by_gain,
            )
        settings, leaves = best.settings, best.leaves
        judged = [self.jobs(level) for level in levels]  # others than those that the rules were chosen by
        least = [self.played(jobs, LeastLoaded(LoadSettings(seed=0))) for jobs in judged]
        return Distilled(
            settings.model_copy(update={"seed": None}),
            tuple(leaves),
            _gain(least, [self.played_by_prediction(jobs) for jobs in judged]),
            _gain(least, [self.played(jobs, Thresholds(settings)) for jobs in judged]),
            _gain(least, [self.played(jobs, Thresholds(ThresholdSettings(seed=0))) for jobs in judged]),
            self.requests,
        )

    def predictor(self) -> Predictor:
        predictor = Predictor(LoadMeter(), self.calibration)
        predictor.learn(self.knowledge)
        return predictor

    def jobs(self, level: float) -> list[Job]:
        """Return requests that arrive at random, as fast as a pool with so many on each backend gets them done."""
        predictor, rng = self.predictor(), self.rng
        pool = fluid_pool(predictor, self.candidates)
        rate = 0.0
        for backend in pool:
            work_s = 0.0
            backend.in_flight = round(level)
            for key, features in zip(self.keys, self.features, strict=True):
                one = predictor.predict(features, key, [backend], 0.0)[0]
                cost = backend.cost
                each_s = cost.per_request_s + cost.per_context_token_s * one.context_tokens
                work_s += (
                    one.steps * (cost.base_s + level * each_s) + level * cost.per_prompt_token_s * one.prompt_tokens
                )
            rate += level * len(self.keys) / work_s
        there = round(level * len(pool))
        jobs, at_s = [], 0.0
        for number in range(there + max(_JOBS, 3 * there)):
            place = rng.randrange(len(self.keys))
            key, features = self.keys[place], self.features[place]
            mean = self.knowledge.length.tokens(features, key)
            tokens = mean * math.exp(self.noise * rng.gauss(0.0, 1.0) - self.noise**2 / 2)
            tokens = min(max(1.0, tokens), features.max_tokens or math.inf)
            if number >= there:
                at_s += rng.expovariate(rate)
            jobs.append(Job(features, key, tokens, at_s, 1.0 if number >= there else rng.uniform(0.01, 0.99)))
        return jobs

    def played(self, jobs: Sequence[Job], policy: Policy, *, notes: bool = False) -> float:
        """Let a policy choose, and note what there was to choose between if asked to."""
        predictor = self.predictor()
        pool = fluid_pool(predictor, self.candidates)
        places = {backend.name: place for place, backend in enumerate(pool)}

        shares = []

        def choose(job: Job, backends: Sequence[FluidBackend], now_s: float) -> int:
            chosen = places[policy.choose(job.features, backends).backend]
            if notes:
                predictions = predictor.predict(job.features, job.key, backends, now_s)
                self.note(job.key, backends, [self.cost(job.features, one) for one in predictions])
                shares.append((backends[chosen].name, predictions[chosen].share))
                predictor.known[backends[chosen].name].backlog.send(predictions[chosen].share, now_s)
            return chosen

        def end(number: int) -> None:
            if notes:
                name, share = shares[number]
                predictor.known[name].backlog.end(share)

        return play(jobs, predictor, pool, choose, end)

    def played_by_prediction(self, jobs: Sequence[Job]) -> float:
        """Choose the least cost, and note what was to be chosen between."""
        predictor = self.predictor()
        pool = fluid_pool(predictor, self.candidates)
        shares = []

        def choose(job: Job, backends: Sequence[FluidBackend], now_s: float) -> int:
            predictions = predictor.predict(job.features, job.key, backends, now_s)
            costs = [self.cost(job.features, one) for one in predictions]
            chosen = min(range(len(costs)), key=costs.__getitem__)
            shares.append((backends[chosen].name, predictions[chosen].share))
            predictor.known[backends[chosen].name].backlog.send(predictions[chosen].share, now_s)
            self.note(job.key, backends, costs)
            return chosen

        def end(number: int) -> None:
            name, share = shares[number]
            predictor.known[name].backlog.end(share)

        return play(jobs, predictor, pool, choose, end)

    def add_even(self, level: float) -> None:
        """Note what there is to choose between where every backend has the same load."""
        predictor = self.predictor()
        pool = fluid_pool(predictor, self.candidates)
        for backend in pool:
            backend.in_flight = round(level)
        for key, features in zip(self.keys, self.features, strict=True):
            predictions = predictor.predict(features, key, pool, 0.0)
            self.note(key, pool, [self.cost(features, one) for one in predictions])

    def note(self, key: Key, backends: Sequence[FluidBackend], costs: Sequence[float]) -> None:
        self.rows.append((key, sum(one.in_flight for one in backends) / len(backends)))
        self.costs.append([min(costs[place] for place in places) for places in self.targets.values()])

    def leaves(self, part: slice) -> list[Leaf]:
        rows, costs = self.rows[part], np.array(self.costs[part])
        # Each level counts the same, however many requests were sent at it.
        weights: Floats = 1.0 / costs.mean(axis=1)
        columns = columns_of([key for key, _ in rows])
        table = np.array([row_of(columns, key, load) for key, load in rows])
        return grow(columns, table, costs, weights, list(self.targets), MOST_LEAVES)


def _gain(least: Sequence[float], others: Sequence[float]) -> float:
    return 1.0 - sum(other / one for one, other in zip(least, others, strict=True)) / len(least)


def _targets(candidates: Sequence[Candidate]) -> dict[str, list[int]]:
    """Return what a rule may prefer, each with its places.

    Those are methods, or backends by name where those of a method are not alike.
    """
    arms: dict[str, set[str]] = {}
    for one in candidates:
        arms.setdefault(one.method.value, set()).add(arm_of(one))
    targets: dict[str, list[int]] = {}
    for place, one in enumerate(candidates):
        targets.setdefault(one.method.value if len(arms[one.method.value]) == 1 else BACKEND + one.name, []).append(
            place
        )
    return targets


def _representative(key: Key, rng: Random) -> RequestFeatures:
    """Return a request that has the given key."""
    shape, limit = key[SHAPE], key[LIMIT]
    return RequestFeatures(
        "",
        Endpoint.CHAT,
        temperature=_within((0.0, *TEMPERATURES, 1.5), int(key[TEMPERATURE]), rng),
        overlap=_within((0.0, *OVERLAPS, 0.9), int(key[OVERLAP]), rng),
        code_share=0.6 if shape == "code" else 0.0,
        prompt_tokens=int(_within((8, *PROMPT_TOKENS, 65536), int(key[PROMPT]), rng)),
        max_tokens=int(_within((8, *LIMITS, 8192), int(limit), rng)) if limit else None,
        template=key[TEMPLATE],
        turns=1 if key[TURNS] == "first" else 3,
        structured=shape == "structured",
        workload=key[WORKLOAD],
    )


def _within(bounds: Sequence[float], place: int, rng: Random) -> float:
    return rng.uniform(bounds[place], bounds[place + 1] * (1 - 1e-9))


def _flow(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000).strip()
