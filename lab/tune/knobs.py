"""Tunable numbers in the rules of `thresholds`, and their scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from lab.replay.simulate import Replayed, slo_kept
from policies.rules.conditions import Bounds
from policies.rules.policy import ThresholdSettings

_SPANS = {"temperature": (0.0, 2.0), "top_p": (0.0, 1.0), "overlap": (0.0, 1.0), "code_share": (0.0, 1.0)}
_FACTOR = 8.0  # range of numbers that count something, up and down
_SLACK = (0.0, 64.0)
_WEIGHT_FACTOR = 2.0
_RATIO = (1.0, 4.0)
_DIGITS = 3  # significant digits of tuned numbers; more would suggest false precision

Values = Mapping[str, float]


class Goal(StrEnum):
    """The goal: mean or p99 of the time to finish, or the share of requests that keep the SLO."""

    MEAN = "mean"
    P99 = "p99"
    GOODPUT = "goodput"


@dataclass(frozen=True, slots=True)
class Knob:
    """A tunable number in the rules."""

    # `rule.feature.low` or `rule.feature.high` for a bound, `rule.slack`, `rule.weights.target`, `spill.slack` or
    # `spill.ratio`.
    name: str
    present: float  # present value
    # least, most: ends of the search range.
    least: float
    most: float
    whole: bool = False  # whether it is a count, which is searched on a logarithmic scale


def knobs(settings: ThresholdSettings) -> list[Knob]:
    """Return the tunable numbers: bounds except exact numbers and counts of 0, weights, slacks and spill.

    Examples
    --------
    >>> rules = [{"name": "copies", "when": {"overlap": ">= 0.5"}, "prefer": ["suffix"]}]
    >>> [knob.name for knob in knobs(ThresholdSettings.model_validate({"rules": rules}))]
    ['copies.overlap.low', 'spill.slack', 'spill.ratio']
    """
    result = []
    for rule in settings.rules:
        for feature, condition in rule.when.conditions().items():
            if not isinstance(condition, Bounds) or condition.low == condition.high:
                continue
            for end in ("low", "high"):
                present = getattr(condition, end)
                if not math.isfinite(present):
                    continue
                name = f"{rule.name}.{feature}.{end}"
                if feature in _SPANS:
                    least, most = _SPANS[feature]
                    result.append(Knob(name, present, min(least, present), max(most, present)))
                elif present >= 1:
                    result.append(Knob(name, present, max(1.0, present / _FACTOR), present * _FACTOR, whole=True))
        result += [
            Knob(f"{rule.name}.weights.{target}", weight, weight / _WEIGHT_FACTOR, weight * _WEIGHT_FACTOR)
            for target, weight in rule.weights.items()
        ]
        if rule.slack is not None:
            result.append(Knob(f"{rule.name}.slack", rule.slack, _SLACK[0], max(_SLACK[1], 2 * rule.slack)))
    slack, ratio = settings.spill.slack, settings.spill.ratio
    result.append(Knob("spill.slack", slack, _SLACK[0], max(_SLACK[1], slack)))
    result.append(Knob("spill.ratio", ratio, _RATIO[0], max(_RATIO[1], ratio)))
    return result


def with_values(settings: ThresholdSettings, values: Values) -> ThresholdSettings:
    """Return the rules with other numbers."""
    rules = []
    for rule in settings.rules:
        when: dict[str, object] = {}
        for feature, condition in rule.when.conditions().items():
            moved: object = condition
            if isinstance(condition, Bounds):
                ends = {end: values.get(f"{rule.name}.{feature}.{end}", getattr(condition, end)) for end in _ENDS}
                moved = replace(condition, **ends)
                if moved.is_empty():
                    raise ValueError(f"rule '{rule.name}': {feature} can never hold")
            when[feature] = moved
        weights = {
            target: values.get(f"{rule.name}.weights.{target}", weight) for target, weight in rule.weights.items()
        }
        slack = values.get(f"{rule.name}.slack", rule.slack)
        targets: dict[str, object] = {"weights": weights} if weights else {"prefer": rule.prefer}
        rules.append({"name": rule.name, "when": when, "slack": slack, **targets})
    spill = {name: values.get(f"spill.{name}", getattr(settings.spill, name)) for name in ("slack", "ratio")}
    kept = settings.model_dump(exclude={"rules", "spill"})
    return ThresholdSettings.model_validate({**kept, "rules": rules, "spill": spill})


_ENDS = ("low", "high")


@dataclass(frozen=True, slots=True)
class Scoring:
    """The score to minimize: seconds, or the share of requests that miss their SLO."""

    goal: Goal
    slo: Mapping[str, float]  # bounds as for `slo_kept`, for `Goal.GOODPUT`

    def __call__(self, played: Sequence[Replayed]) -> float:
        """Return the score of all results together; requests that were not served miss the SLO."""
        e2e_s = np.concatenate([one.e2e_s for one in played])
        if not len(e2e_s):
            return math.inf
        if self.goal is Goal.GOODPUT:
            kept = sum(float(slo_kept(one, self.slo).sum()) for one in played)
            return 1.0 - kept / (len(e2e_s) + sum(one.errors for one in played))
        return float(e2e_s.mean() if self.goal is Goal.MEAN else np.percentile(e2e_s, 99))


def rounded(value: float, knob: Knob) -> float:
    """Return a number rounded for use in rules.

    Examples
    --------
    >>> rounded(0.123456, Knob("code.overlap.low", 0.5, 0.0, 1.0))
    0.123
    """
    short = float(f"{value:.{_DIGITS}g}")
    return float(round(short)) if knob.whole else short
