"""Search for the mix of replicas that serves a trace best, on one half of its parts, and validation on the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from backends.drafting.script import BLOCK_TOKENS
from lab.evaluate.bootstrap import Interval, block_length, block_sums, interval
from lab.plan.mixes import Kind, Mix, count_mixes, mixes, neighbours
from lab.replay.request import ReplayRequest
from lab.replay.simulate import Replayed, ReplicaSpec, replay, slo_kept
from lab.report.distributions import ecdf
from policies.guarded.policy import build
from policies.policy import PolicySettings

Floats = npt.NDArray[np.float64]
Task = tuple[Mix, int, int]
"""A mix, the index of a part of the trace, and a seed."""

RunAll = Callable[[Sequence[Task]], Sequence[Replayed]]
"""Runs tasks in parallel, and returns their results in the same order."""

_METRICS = ("e2e_s", "ttft_s", "tpot_s")
_BEST = 3
_FINALISTS = 4


@dataclass(frozen=True, slots=True)
class Objective:
    """The objective: the least mean time to finish, or, with bounds, the most requests that keep their SLO.

    Parameters
    ----------
    slo
        Bounds in seconds as for `lab.replay.simulate.slo_kept`; empty for the mean time to finish.
    """

    slo: Mapping[str, float] = field(default_factory=dict)

    def values(self, played: Replayed) -> Floats:
        """Return the value of each served request: seconds to finish, or 1 if it kept its SLO and 0 if not."""
        return slo_kept(played, self.slo).astype(np.float64) if self.slo else played.e2e_s

    def value(self, played: Sequence[Replayed]) -> float:
        """Return the mean value; a request that was not served misses its SLO, or takes infinitely long."""
        errors = sum(one.errors for one in played)
        values = np.concatenate([self.values(one) for one in played])
        if self.slo:
            return float(values.sum() / (len(values) + errors))
        return math.inf if errors else float(values.mean())

    def cost(self, played: Sequence[Replayed]) -> float:
        """Return the quantity to minimize."""
        return -self.value(played) if self.slo else self.value(played)


@dataclass(frozen=True, slots=True)
class JudgedMix:
    """The result of a mix on the parts held out from the search.

    Parameters
    ----------
    value
        Mean seconds to finish, or share of requests that kept their SLO.
    gain
        Gain of the chosen mix over this one, with its 95% interval: share of the time saved, or relative increase of
        kept requests. None for the chosen mix itself, with too few requests, and if requests were not served.
    better_in
        Share of parts and seeds in which the chosen mix is better.
    by_part
        `value` by part of the trace, over the seeds, shape (parts,).
    distributions
        By `e2e_s`, `ttft_s` and `tpot_s`: points as of `lab.report.distributions.ecdf`, in seconds.
    """

    mix: Mix
    e2e_s: float
    ttft_s: float
    tpot_s: float
    value: float
    gain: Interval | None
    better_in: float
    by_part: tuple[float, ...]
    distributions: Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Plan:
    """The mix that serves the trace best.

    Parameters
    ----------
    chosen
        The best mix; the first of `judged`.
    judged
        The best mix, the runners-up, the best mix of one kind, and the present mix if there is one.
    one_kind, present
        The best mix of one kind, and the present mix.
    tried, possible
        Number of mixes tried, and of all mixes.
    """

    kinds: tuple[Kind, ...]
    chosen: Mix
    judged: tuple[JudgedMix, ...]
    one_kind: Mix
    present: Mix | None
    tried: int
    possible: int

    def label(self, mix: Mix) -> str:
        """Return what a mix is: the plan, the best of one kind, the present one; empty for none of them."""
        named = (("the plan", self.chosen), ("best of one kind", self.one_kind), ("present", self.present))
        return ", ".join(word for word, one in named if one == mix)


@dataclass(frozen=True, slots=True)
class MixRunner:
    """Runs tasks; sent once to every worker."""

    calibration: str
    kinds: tuple[Kind, ...]
    policy: str
    settings: PolicySettings
    parts: tuple[Sequence[ReplayRequest], ...]

    def __call__(self, task: Task) -> Replayed:
        """Run one task; with the same seed, every mix gets the same draws."""
        mix, part, seed = task
        pool = [self._replica(f"{self.kinds[kind].method}-{number}", kind) for number, kind in enumerate(mix)]
        return replay(pool, self.parts[part], build(self.policy, self.settings), seed=seed)

    def _replica(self, name: str, index: int) -> ReplicaSpec:
        kind = self.kinds[index]
        blocks = max(1, kind.fit.tokens // BLOCK_TOKENS)
        return ReplicaSpec(name, kind.method, kind.config, self.calibration, kv_blocks=blocks)


def find_mix(
    runner: MixRunner,
    usable: Sequence[int],
    replicas: int,
    run_all: RunAll,
    *,
    objective: Objective,
    present: Mix | None = None,
    budget: int = 200,
    seeds: int = 2,
) -> Plan:
    """Search for the best mix.

    If there are at most `budget` mixes, all are tried. Otherwise, the search starts from mixes of one kind and of two
    kinds in halves, and replaces one replica at a time in the best few until none of the new mixes is better.

    Parameters
    ----------
    usable
        Indices of the kinds that fit into memory.
    replicas
        Number of replicas.
    run_all
        Function that runs tasks.
    present
        Present mix, which is validated too.
    budget
        Approximate maximum number of mixes to try.
    seeds
        Number of seeds in the final comparison.

    Raises
    ------
    ValueError
        If there are fewer than two parts, no usable kind, or no mix that serves all requests.
    """
    if len(runner.parts) < 2:
        raise ValueError("at least two parts of the trace are needed, for the search and for the validation")
    if not usable:
        raise ValueError("no kind of replica fits into memory")
    searched, held_out = range(0, len(runner.parts), 2), range(1, len(runner.parts), 2)
    costs: dict[Mix, float] = {}
    cost = partial(_cost, searched, run_all, objective, costs)
    possible = count_mixes(len(usable), replicas)
    to_kinds = partial(_to_kinds, usable)
    if possible <= budget:
        cost([to_kinds(mix) for mix in mixes(len(usable), replicas)])
    else:
        cost([to_kinds(mix) for mix in _starts(len(usable), replicas)])
        _climb(cost, costs, usable, replicas, budget)
    tried = len(costs)
    ranked = sorted(costs, key=lambda mix: (costs[mix], mix))
    if math.isinf(costs[ranked[0]]):
        raise ValueError("no mix tried serves all requests: those with min_p or logit_bias need a baseline")
    singles = [mix for mix in ranked if len(set(mix)) == 1]
    compared = list(dict.fromkeys([*ranked[:_FINALISTS], singles[0], *([present] if present else [])]))
    judged = _judge(compared, ranked[0], held_out, range(1, seeds + 1), run_all, objective)
    return Plan(runner.kinds, ranked[0], tuple(judged), singles[0], present, tried, possible)


def _cost(
    parts: Sequence[int], run_all: RunAll, objective: Objective, costs: dict[Mix, float], candidates: Sequence[Mix]
) -> None:
    """Add the costs of mixes that have none yet."""
    new = [mix for mix in dict.fromkeys(candidates) if mix not in costs]
    played = run_all([(mix, part, 0) for mix in new for part in parts])
    for number, mix in enumerate(new):
        costs[mix] = objective.cost(played[number * len(parts) : (number + 1) * len(parts)])


def _to_kinds(usable: Sequence[int], mix: Mix) -> Mix:
    return tuple(sorted(usable[index] for index in mix))


def _starts(kinds: int, replicas: int) -> list[Mix]:
    half = replicas // 2
    return [(one,) * replicas for one in range(kinds)] + [
        tuple(sorted((one,) * half + (other,) * (replicas - half)))
        for one in range(kinds)
        for other in range(one + 1, kinds)
    ]


def _climb(
    cost: Callable[[Sequence[Mix]], None], costs: Mapping[Mix, float], usable: Sequence[int], replicas: int, budget: int
) -> None:
    index = {kind: number for number, kind in enumerate(usable)}
    expanded: set[Mix] = set()
    while len(costs) < budget:
        best = [mix for mix in sorted(costs, key=lambda mix: (costs[mix], mix))[:_BEST] if mix not in expanded]
        if not best:
            return
        expanded.update(best)
        around = [
            _to_kinds(usable, other)
            for mix in best
            for other in neighbours(tuple(sorted(index[kind] for kind in mix)), len(usable))
        ]
        cost(around)


def _judge(
    compared: Sequence[Mix],
    chosen: Mix,
    parts: Sequence[int],
    seeds: Sequence[int],
    run_all: RunAll,
    objective: Objective,
) -> list[JudgedMix]:
    runs = [(part, seed) for part in parts for seed in seeds]
    played = run_all([(mix, *run) for mix in compared for run in runs])
    by_mix = {mix: played[number * len(runs) : (number + 1) * len(runs)] for number, mix in enumerate(compared)}
    own = by_mix[chosen]
    judged = []
    for mix in compared:
        other = by_mix[mix]
        better = [objective.cost([one]) > objective.cost([mine]) for mine, one in zip(own, other, strict=True)]
        times = {metric: np.concatenate([getattr(one, metric) for one in other]) for metric in _METRICS}
        means = [_mean_of(values) for values in times.values()]
        per_part = [objective.value(other[start : start + len(seeds)]) for start in range(0, len(other), len(seeds))]
        gain = None
        if mix != chosen and not any(one.errors for one in (*own, *other)):
            mine, theirs = ([objective.values(one) for one in each] for each in (own, other))
            gain = _gain(mine, theirs, len(seeds), objective)
        share = 0.0 if mix == chosen else float(np.mean(better))
        drawn = {metric: ecdf(values) for metric, values in times.items()}
        judged.append(
            JudgedMix(mix, means[0], means[1], means[2], objective.value(other), gain, share, tuple(per_part), drawn)
        )
    return judged


def _mean_of(values: Floats) -> float:
    """Return the mean of all values that are not NaN; NaN if there are none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def _gain(own: Sequence[Floats], other: Sequence[Floats], seeds: int, objective: Objective) -> Interval | None:
    """Return the gain of one mix over another on the same requests, by a bootstrap over blocks.

    The seeds of a part are averaged first, since the same requests with other draws are not independent requests.
    """
    mine, theirs = (
        np.concatenate([np.mean(values[start : start + seeds], axis=0) for start in range(0, len(values), seeds)])
        for values in (own, other)
    )
    length = block_length(len(mine))
    up, down = block_sums(mine, length), block_sums(theirs, length)
    if min(up.sum(), down.sum()) <= 0:
        return None
    try:
        ratio = interval([up], [down])
    except ValueError:  # too few blocks
        return None
    if not objective.slo:
        return Interval(1 - ratio.value, 1 - ratio.high, 1 - ratio.low)
    return Interval(ratio.value - 1, ratio.low - 1, ratio.high - 1)
