"""Rules from experience: what `learned` knows, as rules that a person can read and `thresholds` can run.

Requests are drawn from the cells of what was seen (`likely_traffic`), and sent at several loads through a pool that
behaves exactly as was learned (`fluid`, `fluid_choice`). A tree groups those for which the same trade between speed and
load does (`rule_tree`), and each group gets weights that make that trade (`rule_weights`). In the same pool the choice
by prediction, `least_loaded` and the rules are compared, so the rules come with the share of the gain that they keep,
by the same predictions that they were made from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from backends.backend import Candidate
from policies.distill.columns import columns_of, row_of
from policies.distill.fluid import Job
from policies.distill.fluid_choice import FluidChoice, Notes, Situations
from policies.distill.report import Distilled, Leaf
from policies.distill.traffic import LikelyTraffic, Mix
from policies.distill.tree import Group, grow
from policies.distill.weights import Weighed, weighed
from policies.learned.models.acceptance import arm_of
from policies.learned.models.length import LENGTH
from policies.learned.policy import Learned
from policies.learned.predict import Predictor
from policies.load import LoadMeter
from policies.load_balancing import LeastLoaded, LoadSettings
from policies.rules.policy import Thresholds, ThresholdSettings
from policies.rules.rule import BACKEND, Rule

LEVELS = (1.0, 6.0, 24.0, 80.0)
"""Requests in flight per backend, if spread evenly, at which the choices are compared."""

MOST_LEAVES = 12

_UNDECLARED = 0.5
"""Weight of requests that declare nothing, beside those that were seen."""

_SLACKS = (1.0, 0.7, 0.5, 1.4)
"""Times the slack of all rules that are tried: the less of it, the sooner load counts."""


class NothingLearnedError(Exception):
    """There is nothing yet that rules could be made of."""


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
    counts = {key: sums[0] for key, sums in policy.statistics.buckets(LENGTH).items()}
    if not counts:
        raise NothingLearnedError("no request was observed yet")
    calibration = policy.settings.calibration
    priors = {one.name: Predictor(LoadMeter(), calibration).of(one).prior for one in candidates}
    choice = FluidChoice(policy.fitted(priors), calibration, policy.cost.dry_run_copy(), candidates)
    traffic = LikelyTraffic(choice.predictor(), counts, seed)

    plays = [traffic.jobs(candidates, level, mix) for level in levels for mix in Mix]
    notes = Notes(traffic.kinds)
    for jobs in plays:
        choice.by_prediction(jobs, notes)
    situations = notes.situations([one.weight for one in candidates])
    groups, found = _rules(situations, candidates)
    contest = _Contest(choice, plays)
    settings = max((_settings(groups, found, factor) for factor in _SLACKS), key=contest.gain_of_rules)

    # Other requests than those that were chosen by.
    judged = _Contest(choice, [traffic.jobs(candidates, level, mix) for level in levels for mix in Mix])
    seen = len(situations.keys)
    return Distilled(
        settings.model_copy(update={"seed": None}),
        tuple(
            Leaf(float((group.places < seen).sum()) / seen, one.idle_s)
            for group, one in zip(groups, found, strict=True)
        ),
        judged.gain(choice.by_prediction),
        judged.gain_of_rules(settings),
        judged.gain_of_rules(ThresholdSettings(seed=0)),
        sum(counts.values()),
    )


def _rules(situations: Situations, candidates: Sequence[Candidate]) -> tuple[list[Group], list[Weighed]]:
    columns = columns_of(situations.keys)
    every = situations.with_undeclared(_UNDECLARED)
    rows = np.array([row_of(columns, key) for key in every.keys])
    groups = grow(columns, rows, every, MOST_LEAVES)
    targets = _targets(candidates)
    return groups, [weighed(every, group.places, targets) for group in groups]


def _settings(groups: Sequence[Group], found: Sequence[Weighed], factor: float) -> ThresholdSettings:
    rules = [
        Rule.model_validate(
            {"name": group.name, "when": group.when, "weights": one.weights, "slack": round(factor * one.slack)}
        )
        for group, one in zip(groups, found, strict=True)
    ]
    return ThresholdSettings(rules=tuple(rules), seed=0)


class _Contest:
    """Runs of requests, and what each of them takes if `least_loaded` chooses."""

    def __init__(self, choice: FluidChoice, plays: Sequence[Sequence[Job]]) -> None:
        self._choice = choice
        self._plays = [(jobs, choice.by_policy(jobs, LeastLoaded(LoadSettings(seed=0)))) for jobs in plays]

    def gain(self, played: Callable[[Sequence[Job]], float]) -> float:
        """Return by how much the mean time to finish is below that of `least_loaded`, as the mean over the runs."""
        return 1.0 - sum(played(jobs) / least_s for jobs, least_s in self._plays) / len(self._plays)

    def gain_of_rules(self, settings: ThresholdSettings) -> float:
        """Return the same for rules."""
        return self.gain(lambda jobs: self._choice.by_policy(jobs, Thresholds(settings)))


def _targets(candidates: Sequence[Candidate]) -> dict[str, list[int]]:
    """Return what a rule may name, each with its places.

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
