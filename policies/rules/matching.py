"""What choosing by rules comes to for each request, apart from how rules are written, which does not compile."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from backends.backend import Candidate
from policies.features.request import RequestFeatures
from policies.load import draw_least, per_weight
from policies.rules.conditions import Bounds, Words
from policies.rules.rule import BACKEND, Rule


class Test:
    """One condition of a rule, with what it compares at hand."""

    __slots__ = ("_feature", "_flag", "_high", "_high_open", "_is_load", "_low", "_low_open", "_words")

    def __init__(self, feature: str, condition: Bounds | Words | bool) -> None:
        self._feature = feature
        self._is_load = feature == "in_flight_per_backend"
        self._flag: bool | None = condition if isinstance(condition, bool) else None
        self._words: frozenset[str] | None = condition.words if isinstance(condition, Words) else None
        bounds = condition if isinstance(condition, Bounds) else Bounds()
        self._low, self._high = bounds.low, bounds.high
        self._low_open, self._high_open = bounds.low_open, bounds.high_open

    def holds(self, request: RequestFeatures, in_flight_per_backend: float) -> bool:
        """Tell whether it holds."""
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


class RuleTests:
    """All conditions of one rule.

    Attributes
    ----------
    features
        What they ask for.
    """

    __slots__ = ("_tests", "features", "rule")

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        conditions = rule.when.conditions()
        self.features = frozenset(conditions)
        self._tests = [Test(feature, condition) for feature, condition in conditions.items()]

    def __deepcopy__(self, copied: dict[int, object]) -> RuleTests:
        """Return itself, which nothing changes: `Policy.dry_run_copy` copies what has it, also compiled."""
        return self

    def hold(self, request: RequestFeatures, in_flight_per_backend: float) -> bool:
        """Tell whether all hold."""
        for test in self._tests:  # noqa: SIM110 -- a generator costs more
            if not test.holds(request, in_flight_per_backend):
                return False
        return True


def first_that_holds(rules: list[RuleTests], request: RequestFeatures, in_flight_per_backend: float) -> Rule | None:
    """Return the first rule all of whose conditions hold."""
    for one in rules:
        if one.hold(request, in_flight_per_backend):
            return one.rule
    return None


def least_per_weight(candidates: Sequence[Candidate], counts: Sequence[int]) -> float:
    """Return the requests per weight of the candidate that has fewest."""
    return min([per_weight(one, count) for one, count in zip(candidates, counts, strict=True)])


def first_preferred(
    prefer: Sequence[str], candidates: Sequence[Candidate], counts: Sequence[int], bound: float, rng: Random
) -> tuple[Candidate | None, float, bool]:
    """Walk the targets of a rule and stop at the first whose least loaded backend has no more requests than it may.

    Returns
    -------
    tuple
        That backend, or None; the probability that it was drawn; and whether there were backends of any target.
    """
    is_there = False
    for target in prefer:
        name = target.removeprefix(BACKEND) if target.startswith(BACKEND) else ""
        named: list[Candidate] = []
        scores: list[float] = []
        loads: list[int] = []
        for one, count in zip(candidates, counts, strict=True):
            if (one.name == name) if name else (one.method == target):
                named.append(one)
                scores.append(per_weight(one, count + 1))
                loads.append(count)
        if not named:
            continue
        is_there = True
        chosen, propensity = draw_least(named, scores, rng)
        for one, count in zip(named, loads, strict=True):
            if one is chosen and per_weight(one, count) <= bound:
                return chosen, propensity, True
    return None, 0.0, is_there
