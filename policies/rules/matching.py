"""Evaluation of rules, which runs for every request; a module without pydantic, so that mypyc can compile it."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from backends.backend import Candidate
from policies.features.request import RequestFeatures
from policies.load import draw_least, per_weight
from policies.rules.conditions import Bounds, Condition
from policies.rules.rule import BACKEND, Rule


class CompiledCondition:
    """One condition of a rule, prepared for fast evaluation."""

    __slots__ = ("_feature", "_flag", "_high", "_high_open", "_is_load", "_low", "_low_open", "_words")

    def __init__(self, feature: str, condition: Condition) -> None:
        self._feature = feature
        self._is_load = feature == "in_flight_per_backend"
        self._flag: bool | None = condition if isinstance(condition, bool) else None
        self._words: frozenset[str] | None = condition if isinstance(condition, frozenset) else None
        bounds = condition if isinstance(condition, Bounds) else Bounds()
        self._low, self._high = bounds.low, bounds.high
        self._low_open, self._high_open = bounds.low_open, bounds.high_open

    def holds(self, request: RequestFeatures, in_flight_per_backend: float) -> bool:
        """Return whether the condition holds for a request."""
        if self._is_load:
            return self._is_within(in_flight_per_backend)
        value = getattr(request, self._feature)
        if self._flag is not None:
            return value is self._flag
        if self._words is not None:
            return value in self._words
        return value is not None and self._is_within(value)

    def _is_within(self, value: float) -> bool:
        low, high = self._low, self._high
        if value < low or value > high:
            return False
        return not (self._low_open and value == low) and not (self._high_open and value == high)


class CompiledRule:
    """A rule with its conditions prepared for fast evaluation."""

    __slots__ = ("_conditions", "features", "rule")

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        conditions = rule.when.conditions()
        self.features = frozenset(conditions)  # names of the features that the conditions use
        self._conditions = [CompiledCondition(feature, condition) for feature, condition in conditions.items()]

    def __deepcopy__(self, copied: dict[int, object]) -> CompiledRule:
        """Return the rule itself, which is immutable; a compiled class has no other way to be copied."""
        return self

    def holds(self, request: RequestFeatures, in_flight_per_backend: float) -> bool:
        """Return whether all conditions hold for a request."""
        for condition in self._conditions:  # noqa: SIM110 -- a generator costs more
            if not condition.holds(request, in_flight_per_backend):
                return False
        return True


def first_match(rules: list[CompiledRule], request: RequestFeatures, in_flight_per_backend: float) -> Rule | None:
    """Return the first rule whose conditions all hold, or None."""
    for rule in rules:
        if rule.holds(request, in_flight_per_backend):
            return rule.rule
    return None


def least_per_weight(candidates: Sequence[Candidate], counts: Sequence[int]) -> float:
    """Return the requests per unit of weight of the least loaded candidate."""
    return min([per_weight(candidate, count) for candidate, count in zip(candidates, counts, strict=True)])


def is_target(candidate: Candidate, target: str) -> bool:
    """Return whether an entry of `prefer` names a candidate, by method or by name."""
    return candidate.method == target or target == BACKEND + candidate.name


def first_preferred(
    prefer: Sequence[str], candidates: Sequence[Candidate], counts: Sequence[int], bound: float, rng: Random
) -> tuple[Candidate | None, float, bool]:
    """Return the least loaded backend of the first target for which its load is within a bound."""
    any_target = False
    for target in prefer:
        named: list[Candidate] = []
        scores: list[float] = []
        loads: list[int] = []
        for candidate, count in zip(candidates, counts, strict=True):
            if is_target(candidate, target):
                named.append(candidate)
                scores.append(per_weight(candidate, count + 1))
                loads.append(count)
        if not named:
            continue
        any_target = True
        chosen, propensity = draw_least(named, scores, rng)
        for candidate, count in zip(named, loads, strict=True):
            if candidate is chosen and per_weight(candidate, count) <= bound:
                return chosen, propensity, True
    return None, 0.0, any_target
