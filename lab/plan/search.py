"""Which mix of replicas serves a trace best: a search on one half of its parts, judged on the other."""

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
from policies.policy import PolicySettings, policies

Floats = npt.NDArray[np.float64]
Task = tuple[Mix, int, int]
"""A mix, the number of a part of the trace, and a seed."""

RunAll = Callable[[Sequence[Task]], Sequence[Replayed]]
"""Plays tasks, on as many cores as there are, and returns what came of each in the same order."""

_BEST = 3
_FINALISTS = 4


@dataclass(frozen=True, slots=True)
class Objective:
    """What is sought: the least mean time to finish, or, with bounds, the most requests that keep their SLO.

    Parameters
    ----------
    slo
        As `lab.replay.simulate.slo_kept` takes it; none for the mean.
    """

    slo: Mapping[str, float] = field(default_factory=dict)

    def values(self, played: Replayed) -> Floats:
        """Return the value of each request that was served: seconds, of which less is better, or kept or not."""
        return slo_kept(played, self.slo).astype(np.float64) if self.slo else played.e2e_s

    def value(self, played: Sequence[Replayed]) -> float:
        """Return the mean value; a request that was not served keeps no SLO, and never ends."""
        errors = sum(one.errors for one in played)
        values = np.concatenate([self.values(one) for one in played])
        if self.slo:
            return float(values.sum() / (len(values) + errors))
        return math.inf if errors else float(values.mean())

    def cost(self, played: Sequence[Replayed]) -> float:
        """Return what is minimised."""
        return -self.value(played) if self.slo else self.value(played)


@dataclass(frozen=True, slots=True)
class Judged:
    """A mix as it did on the parts that the search has not seen.

    Parameters
    ----------
    value
        Mean seconds to finish, or share of requests that kept their SLO.
    gain
        What the chosen mix gains over this one: share of the time it saves, or of kept requests it adds, with its 95%
        interval; None for the chosen mix itself, where too little was played to tell, and where requests were not
        served.
    better_in
        Share of parts and seeds in which the chosen mix did better.
    """

    mix: Mix
    e2e_s: float
    ttft_s: float
    tpot_s: float
    value: float
    gain: Interval | None
    better_in: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The mix that serves the trace best.

    Parameters
    ----------
    chosen
        First of `judged`.
    judged
        It, the runners-up, the best of one kind, and the present mix where there is one.
    present, one_kind
        Which of the mixes those are.
    tried, possible
        Mixes that were played, and that there are.
    """

    kinds: tuple[Kind, ...]
    chosen: Mix
    judged: tuple[Judged, ...]
    one_kind: Mix
    present: Mix | None
    tried: int
    possible: int


@dataclass(frozen=True, slots=True)
class Game:
    """Everything that a task needs beside itself; sent once to every worker."""

    calibration: str
    kinds: tuple[Kind, ...]
    policy: str
    settings: PolicySettings
    parts: tuple[Sequence[ReplayRequest], ...]

    def __call__(self, task: Task) -> Replayed:
        """Play one task; the same seed gives the same luck to every mix."""
        mix, part, seed = task
        pool = [self._replica(f"{self.kinds[place].method}-{number}", place) for number, place in enumerate(mix)]
        return replay(pool, self.parts[part], policies()[self.policy](self.settings), seed=seed)

    def _replica(self, name: str, place: int) -> ReplicaSpec:
        kind = self.kinds[place]
        blocks = max(1, kind.fit.tokens // BLOCK_TOKENS)
        return ReplicaSpec(name, kind.method, kind.config, self.calibration, kv_blocks=blocks)


def find(
    game: Game,
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

    All mixes are tried where there are no more than `budget`; else those of one kind, of two in halves, and the present
    one, and then, from the best few, mixes with one replica of another kind, until none of them is better.

    Parameters
    ----------
    usable
        Places of the kinds that may be used: those that fit.
    replicas
        How many.
    run_all
        Plays tasks.
    budget
        Mixes to play at most, roughly.
    seeds
        With how many seeds the last comparison is played.

    Raises
    ------
    ValueError
        If there are fewer than two parts, no kind to use, or no mix that serves all requests.
    """
    if len(game.parts) < 2:
        raise ValueError("one half of the trace is searched and the other judged: it takes two parts at least")
    if not usable:
        raise ValueError("no way of running a replica fits")
    searched, held_out = range(0, len(game.parts), 2), range(1, len(game.parts), 2)
    costs: dict[Mix, float] = {}
    cost = partial(_cost, searched, run_all, objective, costs)
    possible = count_mixes(len(usable), replicas)
    to_places = partial(_to_places, usable)
    if possible <= budget:
        cost([to_places(mix) for mix in mixes(len(usable), replicas)])
    else:
        cost([to_places(mix) for mix in _starts(len(usable), replicas)])
        _climb(cost, costs, usable, replicas, budget)
    tried = len(costs)
    ranked = sorted(costs, key=lambda mix: (costs[mix], mix))
    if math.isinf(costs[ranked[0]]):
        raise ValueError("no mix that was tried serves all requests: those with min_p or logit_bias need a baseline")
    singles = [mix for mix in ranked if len(set(mix)) == 1]
    compared = list(dict.fromkeys([*ranked[:_FINALISTS], singles[0], *([present] if present else [])]))
    judged = _judge(compared, ranked[0], held_out, range(1, seeds + 1), run_all, objective)
    return Plan(game.kinds, ranked[0], tuple(judged), singles[0], present, tried, possible)


def _cost(
    parts: Sequence[int], run_all: RunAll, objective: Objective, costs: dict[Mix, float], wanted: Sequence[Mix]
) -> None:
    """Play the mixes that were not yet played, and note what they cost."""
    new = [mix for mix in dict.fromkeys(wanted) if mix not in costs]
    played = run_all([(mix, part, 0) for mix in new for part in parts])
    for number, mix in enumerate(new):
        costs[mix] = objective.cost(played[number * len(parts) : (number + 1) * len(parts)])


def _to_places(usable: Sequence[int], mix: Mix) -> Mix:
    return tuple(sorted(usable[place] for place in mix))


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
    place = {kind: number for number, kind in enumerate(usable)}
    looked: set[Mix] = set()
    while len(costs) < budget:
        best = [mix for mix in sorted(costs, key=lambda mix: (costs[mix], mix))[:_BEST] if mix not in looked]
        if not best:
            return
        looked.update(best)
        around = [
            _to_places(usable, other)
            for mix in best
            for other in neighbours(tuple(sorted(place[kind] for kind in mix)), len(usable))
        ]
        cost(around)


def _judge(
    compared: Sequence[Mix],
    chosen: Mix,
    parts: Sequence[int],
    seeds: Sequence[int],
    run_all: RunAll,
    objective: Objective,
) -> list[Judged]:
    runs = [(part, seed) for part in parts for seed in seeds]
    played = run_all([(mix, *run) for mix in compared for run in runs])
    by_mix = {mix: played[number * len(runs) : (number + 1) * len(runs)] for number, mix in enumerate(compared)}
    own = by_mix[chosen]
    judged = []
    for mix in compared:
        other = by_mix[mix]
        better = [objective.cost([one]) > objective.cost([mine]) for mine, one in zip(own, other, strict=True)]
        means = [_mean_of([getattr(one, metric) for one in other]) for metric in ("e2e_s", "ttft_s", "tpot_s")]
        gain = None
        if mix != chosen and not any(one.errors for one in (*own, *other)):
            mine, theirs = ([objective.values(one) for one in each] for each in (own, other))
            gain = _gain(mine, theirs, len(seeds), objective)
        share = 0.0 if mix == chosen else float(np.mean(better))
        judged.append(Judged(mix, means[0], means[1], means[2], objective.value(other), gain, share))
    return judged


def _mean_of(values: Sequence[Floats]) -> float:
    """Return the mean of all that is not NaN; NaN of nothing."""
    known = np.concatenate(values)
    known = known[~np.isnan(known)]
    return float(known.mean()) if len(known) else math.nan


def _gain(own: Sequence[Floats], other: Sequence[Floats], seeds: int, objective: Objective) -> Interval | None:
    """Return what one mix gains over another, from the same requests, in blocks of neighbours.

    The seeds of a part are averaged first: the same requests with other luck are not as many requests again.
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
