"""Distillation of a learned policy into readable rules for `thresholds`.

Requests are drawn from the statistics (`traffic`) and sent at several loads through a fluid model of the pool that
behaves exactly as learned (`fluid`, `fluid_choice`). A tree groups the requests that share a trade-off between speed
and load (`tree`), and each group gets the weights that fit it (`weights`). In the same pool, the rules are compared
with the choice by prediction and with `least_loaded`, so they come with the share of the gain that they keep, as
predicted when distilled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from backends.backend import Candidate
from policies.arm import arm_of
from policies.balancing.least_loaded import LeastLoaded
from policies.distill.columns import columns_of, row_of
from policies.distill.fluid import Job
from policies.distill.fluid_choice import FluidChoice, SituationLog, Situations
from policies.distill.report import Distilled, Leaf
from policies.distill.support import RuleList
from policies.distill.traffic import LikelyTraffic
from policies.distill.tree import Group, grow, unique_names
from policies.distill.weights import RuleWeights
from policies.lean.thresholds import NothingLearnedError
from policies.learned.models.length import LENGTH
from policies.learned.policy import Learned
from policies.learned.predict import Predictor
from policies.load import LoadMeter
from policies.load_policy import LoadSettings
from policies.rules.policy import Thresholds, ThresholdSettings
from policies.rules.rule import BACKEND, Rule
from policies.trouble.troubles import Finding

LEVELS = (1.0, 6.0, 24.0, 80.0)
"""Mean requests in flight per backend at which choices are compared."""

MAX_RULES = 8


def distill(
    policy: Learned, candidates: Sequence[Candidate], *, levels: Sequence[float] = LEVELS, seed: int = 0
) -> Distilled:
    """Return rules for what a policy has learned.

    Takes seconds, may run in any thread, and changes nothing in the policy.
    """
    if len(candidates) < 2:
        raise NothingLearnedError("there must be at least two backends to choose between")
    counts = {key: sums[0] for key, sums in policy.statistics.buckets(LENGTH).items()}
    if not counts:
        raise NothingLearnedError("no request was observed yet")
    calibration = policy.settings.calibration
    priors = {candidate.name: Predictor(LoadMeter(), calibration).of(candidate).prior for candidate in candidates}
    cost = policy.settings.cost()
    cost.mean_urgency = policy.cost.mean_urgency
    choice = FluidChoice(policy.fitted(priors), calibration, cost, candidates)
    traffic = LikelyTraffic(choice.predictor(), counts, seed)

    log = SituationLog(traffic.kinds)
    for level in levels:
        choice.by_prediction(traffic.jobs(candidates, level), log)
    situations = log.situations([candidate.weight for candidate in candidates])
    fitted = _fit_rules(situations, candidates, sum(counts.values()))
    settings = _settings(fitted)

    # Other draws than those that the rules were made from, but of the same observed requests: those that were not seen
    # are in no statistics.
    comparison = _Comparison(choice, [traffic.jobs(candidates, level) for level in levels])
    spared = [
        (rule, str(found))
        for found in policy.troubles.found
        if not found.client and (rule := _sparing(found, candidates))
    ]
    return Distilled(
        settings.model_copy(update={"seed": None, "rules": (*[rule for rule, _ in spared], *settings.rules)}),
        tuple(Leaf(len(group.indices) / len(situations.keys), weights.idle_s) for group, weights in fitted),
        comparison.gain(choice.by_prediction),
        comparison.gain_of_rules(settings),
        comparison.gain_of_rules(ThresholdSettings(seed=0)),
        sum(counts.values()),
        tuple(reason for _, reason in spared),
    )


_STRUCTURED: Final = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag", "other_format")
_CONDITIONS: Final[dict[str, dict[str, object]]] = {
    "tools": {"tools": True},
    "forced_tool": {"tools": True},
    "thinking": {"thinking": True},
    "several": {"n": ">= 2"},
    "prompt_8k": {"prompt_tokens": ">= 8192"},
    "prompt_32k": {"prompt_tokens": ">= 32768"},
    **{each: {"structured": True} for each in _STRUCTURED},
}
"""The condition of a rule for each of the things that requests ask for, where there is one."""


def _sparing(found: Finding, candidates: Sequence[Candidate]) -> Rule | None:
    """Return the rule that keeps requests away from where they go wrong; None if there is no condition, or no other."""
    safe = [each for each in candidates if arm_of(each) != found.arm or found.backend not in {"", each.name}]
    if not safe or not all(each in _CONDITIONS for each in found.shape):
        return None
    when: dict[str, object] = {}
    for each in found.shape:
        when |= _CONDITIONS[each]
    name = f"{'-'.join(found.shape)}-{found.problem}"[:40]
    return Rule.model_validate({"name": name, "when": when, "prefer": [f"{BACKEND}{each.name}" for each in safe]})


def _fit_rules(
    situations: Situations, candidates: Sequence[Candidate], requests: float
) -> list[tuple[Group, RuleWeights]]:
    """Return the rules that earn their place, with their weights."""
    columns = columns_of(situations.keys)
    rows = np.array([row_of(columns, key) for key in situations.keys])
    rules = RuleList(grow(columns, rows, situations), rows, situations, requests, _targets(candidates))
    rules.drop_unearned(MAX_RULES)
    return rules.fitted


def _settings(fitted: Sequence[tuple[Group, RuleWeights]]) -> ThresholdSettings:
    names = unique_names([group for group, _ in fitted])
    rules = [
        {"name": name, "when": group.when, "weights": weights.weights, "slack": round(weights.slack)}
        for name, (group, weights) in zip(names, fitted, strict=True)
    ]
    return ThresholdSettings.model_validate({"rules": rules, "seed": 0})


class _Comparison:
    """A comparison of choices with `least_loaded` on the same runs of requests."""

    def __init__(self, choice: FluidChoice, runs: Sequence[Sequence[Job]]) -> None:
        self._choice = choice
        self._runs = [(jobs, choice.by_policy(jobs, LeastLoaded(LoadSettings(seed=0)))) for jobs in runs]

    def gain(self, mean_s: Callable[[Sequence[Job]], float]) -> float:
        """Return the relative reduction of the mean time to finish against `least_loaded`, averaged over the runs."""
        return 1.0 - sum(mean_s(jobs) / least_loaded_s for jobs, least_loaded_s in self._runs) / len(self._runs)

    def gain_of_rules(self, settings: ThresholdSettings) -> float:
        """Return the gain of rules."""
        return self.gain(lambda jobs: self._choice.by_policy(jobs, Thresholds(settings)))


def _targets(candidates: Sequence[Candidate]) -> dict[str, list[int]]:
    """Return the targets of a rule, each with the indices of its backends.

    A target is a method, or a backend if the backends of its method belong to different arms.
    """
    arms: dict[str, set[str]] = {}
    for candidate in candidates:
        arms.setdefault(candidate.method.value, set()).add(arm_of(candidate))
    targets: dict[str, list[int]] = {}
    for index, candidate in enumerate(candidates):
        method = candidate.method.value
        target = method if len(arms[method]) == 1 else BACKEND + candidate.name
        targets.setdefault(target, []).append(index)
    return targets
