"""Which mix of replicas serves a trace best: a search on one half of its parts, judged on the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from policies.intervals import Interval, block_length, block_sums, interval
from policies.mix_play import Played, Request, play
from policies.mixes import Kind, Mix, count_mixes, mixes, neighbours
from policies.policy import PolicySettings

Floats = npt.NDArray[np.float64]
Task = tuple[Mix, int, int]
"""A mix, the number of a part of the trace, and a seed."""

RunAll = Callable[[Sequence[Task]], Sequence[Played]]
"""Plays tasks, on as many cores as there are, and returns what came of each in the same order."""

_BEST = 3
_FINALISTS = 4


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds in seconds; None for none."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def kept(self, played: Played) -> Floats:
        """Return 1 for each request that kept all of them, and 0 for the others; a time that is not there is kept."""
        kept = np.ones(len(played.e2e_s), bool)
        for bound, values in ((self.ttft_s, played.ttft_s), (self.tpot_s, played.tpot_s), (self.e2e_s, played.e2e_s)):
            if bound is not None:
                kept &= ~(values > bound)
        return kept.astype(np.float64)


@dataclass(frozen=True, slots=True)
class Objective:
    """What is sought: the least mean time to finish, or the most requests that keep their SLO."""

    slo: Slo | None = None

    def values(self, played: Played) -> Floats:
        """Return the value of each request: seconds, of which less is better, or kept or not."""
        return played.e2e_s if self.slo is None else self.slo.kept(played)

    def cost(self, played: Sequence[Played]) -> float:
        """Return what is minimised."""
        mean = float(np.concatenate([self.values(one) for one in played]).mean())
        return mean if self.slo is None else -mean


@dataclass(frozen=True, slots=True)
class Judged:
    """A mix as it did on the parts that the search has not seen.

    Parameters
    ----------
    value
        Mean seconds to finish, or share of requests that kept their SLO.
    gain
        What the chosen mix gains over this one: share of the time it saves, or of kept requests it adds, with its 95%
        interval; None for the chosen mix itself, and where too little was played to tell.
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
    parts: tuple[tuple[Request, ...], ...]

    def __call__(self, task: Task) -> Played:
        """Play one task."""
        mix, part, seed = task
        return play(self.calibration, self.kinds, mix, self.policy, self.settings, self.parts[part], seed)


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
        If there are fewer than two parts, or no kind to use.
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
    own = [objective.values(one) for one in by_mix[chosen]]
    judged = []
    for mix in compared:
        values = [objective.values(one) for one in by_mix[mix]]
        sign = 1.0 if objective.slo is None else -1.0
        better = [sign * float(other.mean() - mine.mean()) > 0 for mine, other in zip(own, values, strict=True)]
        means = [
            float(np.nanmean(np.concatenate([getattr(one, metric) for one in by_mix[mix]])))
            for metric in ("e2e_s", "ttft_s", "tpot_s")
        ]
        gain = None if mix == chosen else _gain(own, values, len(seeds), objective)
        share = 0.0 if mix == chosen else float(np.mean(better))
        judged.append(Judged(mix, means[0], means[1], means[2], float(np.concatenate(values).mean()), gain, share))
    return judged


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
    if objective.slo is None:
        return Interval(1 - ratio.value, 1 - ratio.high, 1 - ratio.low)
    return Interval(ratio.value - 1, ratio.low - 1, ratio.high - 1)
