"""Plans a mix for requests: the kinds that fit, the search, and the judgment on other windows; prints nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from backends.calibration.calibration import Calibration
from backends.speculation import Method
from gateway.config.settings import PolicyReference
from lab.options.policy import with_seed
from lab.parallel import all_cores
from lab.plan.mixes import Mix, ReplicaKind, kind_of, kinds, with_refusals, with_schedules
from lab.plan.options import PlanOptions
from lab.plan.result import JudgedMix, Plan, PlanObjective
from lab.plan.runner import MixRunner, MixTask, RunAll
from lab.plan.search import Found, Split, find_mixes
from lab.plan.traffic import Windows
from lab.simulation.simulate import Replayed
from lab.statistics import TIMES, Floats, Interval, of_units

Played = Mapping[Mix, Sequence[Replayed]]
"""Results of each window, by mix."""


def play(mixes: Sequence[Mix], split: Split, run_all: RunAll) -> Played:
    """Play mixes on the windows held out for judging."""
    before = tuple(sorted((*split.learning, *split.searched)))
    results = run_all([MixTask(mix, split.judged, before, 1) for mix in mixes])
    return dict(zip(mixes, results, strict=True))


def choose(found: Found, played: Played, objective: PlanObjective) -> Mix:
    """Return the mix to run: the search's best, or the best of one kind unless the former is shown to be better."""
    best = found.finalists[0]
    alikes = [mix for mix in played if len(set(mix)) == 1 and len(mix) == len(best)]
    if len(set(best)) == 1 or not alikes:
        return best
    alike = min(alikes, key=lambda mix: objective.cost(played[mix]))
    loss = loss_of(played[best], played[alike], objective)
    return best if loss is None or loss.low > 0 else alike


def judged(chosen: Mix, played: Played, objective: PlanObjective) -> list[JudgedMix]:
    """Return the results of mixes, the chosen one first, then best first."""
    results = [_judged(mix, chosen, played, objective) for mix in played]
    return sorted(results, key=lambda one: (one.mix != chosen, objective.cost(played[one.mix])))


def _judged(mix: Mix, chosen: Mix, played: Played, objective: PlanObjective) -> JudgedMix:
    own, other = played[chosen], played[mix]
    means = {metric: _mean_of(np.concatenate([getattr(one, metric) for one in other])) for metric, *_ in TIMES}
    worse = [objective.loss([theirs]) > objective.loss([mine]) for mine, theirs in zip(own, other, strict=True)]
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
    """Return the loss with another mix's results instead of one's own on the same requests; see `JudgedMix.loss`.

    The windows are the independent units.
    """
    if any(one.errors for one in (*own, *other)):
        return None
    mine, theirs = (np.array([objective.values(one).sum() for one in played]) for played in (own, other))
    if min(mine.sum(), theirs.sum()) <= 0:
        return None
    ratio = of_units(theirs, mine)
    return ratio.saved() if objective.slo else ratio.less_one()


Replica = tuple[Method, Mapping[str, Any], int | None]
"""Method and speculative config of a replica, and its context if its drafter shortens it."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and how its replicas are served."""

    calibration: Calibration
    max_model_len: int | None  # the longest context that fits next to the weights; None: the target's
    plan: Plan | None  # None if no kind of replica fits
    kinds: tuple[ReplicaKind, ...]  # all kinds, including those that do not fit; mixes index into these
    model: str  # name for clients
    policy: Mapping[str, Any]  # content of `policy:` in a pool file
    left_out: tuple[Method, ...] = ()  # methods without a published acceptance or draft for the target

    @property
    def replicas(self) -> tuple[ReplicaKind, ...]:
        """The kind of each planned replica; empty if none fits."""
        return () if self.plan is None else tuple(self.kinds[index] for index in self.plan.chosen)


def plan_windows(
    windows: Windows,
    options: PlanOptions,
    calibration: Calibration,
    policy: PolicyReference,
    *,
    model: str,
    present: Sequence[Replica],
    methods: Sequence[tuple[Method, Sequence[int]]],
    objective: PlanObjective,
) -> Planned:
    """Find the mix of methods and k that serves windows of traffic best."""
    requests = [request for window in windows for request in window]
    longest = max(request.prompt_tokens + request.output_tokens for request in requests)
    known = kinds(calibration, longest, methods)
    if not known:
        names = ", ".join(method for method, _ in methods)
        raise ValueError(f"no acceptance and draft of {names} are published for {calibration.target}")
    left_out = tuple(dict.fromkeys(each for each, _ in methods if each not in {one.method for one in known}))
    split = Split.of(len(windows))
    seen = [request for number in (*split.learning, *split.searched) for request in windows[number]]
    known = with_schedules(known, calibration, seen)
    mix = _present(present, calibration, known)
    known = [with_refusals(kind, requests) for kind in known]
    usable = [index for index, kind in enumerate(known) if kind.fit.fits]  # including the current replicas' kinds
    plan, max_model_len = None, None
    if usable:
        runner = MixRunner(calibration.name, tuple(known), policy.name, with_seed(policy.settings, 0), windows)
        with all_cores(runner, options.jobs, "simulating") as run_all:
            plan = _plan(runner, usable, run_all, mix, options, objective, split)
        room = min(known[index].fit.tokens - known[index].k for index in plan.chosen)
        max_model_len = room if room < calibration.scheduler.max_model_len else None
    settings = policy.settings.model_dump(mode="json", exclude_unset=True)
    named = {"name": policy.name, **settings}
    return Planned(calibration, max_model_len, plan, tuple(known), model, named, left_out)


def _plan(
    runner: MixRunner,
    usable: Sequence[int],
    run_all: RunAll,
    present: Mix | None,
    options: PlanOptions,
    objective: PlanObjective,
    split: Split,
) -> Plan:
    found = find_mixes(
        runner.kinds, usable, options.replicas, split, run_all, objective, present=present, budget=options.budget
    )
    played = play(found.finalists, split, run_all)
    chosen = choose(found, played, objective)
    rivals = [mix for mix in found.finalists if len(mix) == options.replicas]  # the current mix may have more
    ranked = sorted(rivals, key=lambda mix: objective.cost(played[mix]))
    alike = chosen if len(set(chosen)) == 1 else next(mix for mix in ranked if len(set(mix)) == 1)
    mixed = chosen if len(set(chosen)) > 1 else next((mix for mix in ranked if len(set(mix)) > 1), None)
    results = tuple(judged(chosen, played, objective))
    return Plan(runner.kinds, chosen, results, alike, mixed, present, found.tried)


def _present(present: Sequence[Replica], calibration: Calibration, known: list[ReplicaKind]) -> Mix | None:
    """Return the current mix, adding its kinds to `known`."""
    mix = []
    for method, config, context in present:
        kind = replace(kind_of(method, config, calibration), context=context)
        same = [index for index, other in enumerate(known) if _same(other, kind)]
        if not same:
            known.append(kind)
        mix.append(same[0] if same else len(known) - 1)
    return tuple(sorted(mix)) or None


def _same(one: ReplicaKind, other: ReplicaKind) -> bool:
    without = [{key: value for key, value in kind.config.items() if key != "model"} for kind in (one, other)]
    alike = (one.method, one.k, one.context) == (other.method, other.k, other.context)
    return alike and without[0] == without[1]
