"""Judgement of mixes on windows of the traffic that the search has not used."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from lab.plan.mixes import Mix
from lab.plan.result import JudgedMix, PlanObjective
from lab.plan.runner import MixTask, RunAll
from lab.plan.search import Found, Split
from lab.simulation.simulate import Replayed
from lab.statistics import TIMES, Floats, Interval, of_units

Played = Mapping[Mix, Sequence[Replayed]]
"""Results by mix, of each window."""


def play(mixes: Sequence[Mix], split: Split, run_all: RunAll) -> Played:
    """Play mixes on the windows to judge on."""
    before = tuple(sorted((*split.learning, *split.searched)))
    results = run_all([MixTask(mix, split.judged, before, 1) for mix in mixes])
    return dict(zip(mixes, results, strict=True))


def choose(found: Found, played: Played, objective: PlanObjective) -> Mix:
    """Return the mix to run: the best of the search, or the best alike where none of several is shown to be better."""
    best = found.finalists[0]
    alikes = [mix for mix in played if len(set(mix)) == 1 and len(mix) == len(best)]
    if len(set(best)) == 1 or not alikes:
        return best
    alike = min(alikes, key=lambda mix: objective.cost(played[mix]))
    loss = loss_of(played[best], played[alike], objective)
    return best if loss is None or loss.low > 0 else alike


def judged(chosen: Mix, played: Played, objective: PlanObjective) -> list[JudgedMix]:
    """Return the results of mixes, the chosen one first, then the best."""
    results = [_judged(mix, chosen, played, objective) for mix in played]
    sign = -1.0 if objective.slo else 1.0
    return sorted(results, key=lambda one: (one.mix != chosen, sign * one.value))


def _judged(mix: Mix, chosen: Mix, played: Played, objective: PlanObjective) -> JudgedMix:
    own, other = played[chosen], played[mix]
    means = {metric: _mean_of(np.concatenate([getattr(one, metric) for one in other])) for metric, *_ in TIMES}
    worse = [objective.cost([theirs]) > objective.cost([mine]) for mine, theirs in zip(own, other, strict=True)]
    return JudgedMix(
        mix,
        **means,
        value=objective.value(other),
        loss=None if mix == chosen else loss_of(own, other, objective),
        worse_in=float(np.mean(worse)),
    )


def _mean_of(values: Floats) -> float:
    """Return the mean of all values that are not NaN; NaN if there are none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def loss_of(own: Sequence[Replayed], other: Sequence[Replayed], objective: PlanObjective) -> Interval | None:
    """Return the loss with other results instead of one's own on the same requests; see `JudgedMix.loss`.

    The windows, which begin idle, are the independent units.
    """
    if any(one.errors for one in (*own, *other)):
        return None
    mine, theirs = (np.array([objective.values(one).sum() for one in played]) for played in (own, other))
    if min(mine.sum(), theirs.sum()) <= 0:
        return None
    ratio = of_units([theirs], [mine])
    return ratio.saved() if objective.slo else ratio.less_one()
