"""The gain of a policy over `least_loaded`: what blocks of time under the one and under the other have shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

EFFECT: Final = 0.2
"""Relative difference that the test is made for."""


class Comparison(NamedTuple):
    """What blocks of time under a policy and under `least_loaded` have shown."""

    # Seconds per unit of work under the policy over those under `least_loaded`; NaN while it is too early to tell.
    ratio: float
    # low, high: interval of the ratio, NaN with it.
    low: float
    high: float
    # own, control: blocks under the policy and under `least_loaded` that were compared.
    own: int
    control: int


class _Sums:
    """Sums over blocks of one arm: logarithms of seconds per unit of work (y) and of the work that arrived (x)."""

    def __init__(self) -> None:
        self.count = 0
        self.x = self.y = self.xx = self.xy = self.yy = 0.0

    def add(self, x: float, y: float) -> None:
        self.count += 1
        self.x += x
        self.y += y
        self.xx += x * x
        self.xy += x * y
        self.yy += y * y


_Group = tuple[_Sums, _Sums]
"""Neighbouring blocks, which had much the same traffic: under the policy, and under `least_loaded`."""


class GainEstimate:
    """The estimate of a switchback experiment [1]_, from blocks of time.

    Blocks are compared with their neighbours only, so that slow changes of the traffic cancel. Within a group, the mean
    logarithm of seconds per unit of work under `least_loaded` is subtracted from that under the policy, after both are
    adjusted for the work that arrived, by a regression over the blocks of each arm in each group (as in an analysis of
    covariance). The groups are the units: their differences give the variance, which for the first few is shrunk to
    that of the blocks within groups. Where the last groups contradict those before them, these are forgotten.

    References
    ----------
    .. [1] Bojinov, Simchi-Levi and Zhao, "Design and Analysis of Switchback Experiments", Management Science 69(7),
       2023.
    """

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self._found = _estimate([])

    def add(self, group: int, seconds_per_work: float, arrived_work: float, *, control: bool) -> None:
        """Add a block, under `least_loaded` if `control`, else under the policy."""
        found = self._groups.get(group)
        if found is None:
            self._forget()
            found = self._groups[group] = _Sums(), _Sums()
        (found[1] if control else found[0]).add(math.log(arrived_work), math.log(seconds_per_work))
        if found[0].count and found[1].count:
            self._found = _estimate([*self._compared().values()])

    def comparison(self, confidence: float) -> Comparison:
        """Return the ratio with an interval that may be looked at at any time, and as often as one likes."""
        found = self._found
        margin = margin_at_any_time(found.variance, confidence, found.freedom)
        if margin > max(_WIDEST, abs(found.difference)) or math.isinf(margin):
            return Comparison(math.nan, math.nan, math.nan, found.own, found.control)
        ratio, low, high = (math.exp(found.difference + sign * margin) for sign in (0.0, -1.0, 1.0))
        return Comparison(ratio, low, high, found.own, found.control)

    def _compared(self) -> dict[int, _Group]:
        """Return the groups that have both arms, the oldest first."""
        return {number: group for number, group in self._groups.items() if group[0].count and group[1].count}

    def _forget(self) -> None:
        """Forget groups that had one arm only, the oldest, and all if the last ones show that it is so no longer."""
        compared = [*self._compared().items()]
        groups = [group for _, group in compared]
        kept = _MOST_GROUPS
        before, recent = _estimate(groups[:-_RECENT]), _estimate(groups[-_RECENT:])
        margin = margin_at_any_time(before.variance + recent.variance, _CHANGED, min(before.freedom, recent.freedom))
        if abs(recent.difference - before.difference) > margin:
            kept = _RECENT
        self._groups = dict(compared[-kept:])


class _Estimate(NamedTuple):
    """An estimate of the difference of logarithms, with its variance and the degrees of freedom of that."""

    difference: float
    variance: float
    freedom: float
    own: int
    control: int


def _estimate(groups: Sequence[_Group]) -> _Estimate:
    freedom = xx = xy = yy = 0.0
    blocks = [0, 0]
    for group in groups:
        for number, arm in enumerate(group):
            blocks[number] += arm.count
            freedom += arm.count - 1
            xx += arm.xx - arm.x * arm.x / arm.count
            xy += arm.xy - arm.x * arm.y / arm.count
            yy += arm.yy - arm.y * arm.y / arm.count
    slope = xy / (xx + _LEAST_VARIANCE)
    freedom = max(0.0, freedom - 1.0)
    within = max(_LEAST_VARIANCE, (yy - slope * xy) / freedom) if freedom else 0.0
    differences, weights = [], []
    for own, control in groups:
        difference = own.y / own.count - control.y / control.count
        differences.append(difference - slope * (own.x / own.count - control.x / control.count))
        weights.append(1.0 / (1.0 / own.count + 1.0 / control.count))
    prior = min(_PRIOR_FREEDOM, freedom)
    freedom = prior + len(groups) - 1
    if freedom <= 0.0:
        return _Estimate(0.0, math.inf, 0.0, blocks[0], blocks[1])
    total = sum(weights)
    mean = sum(weight * difference for weight, difference in zip(weights, differences, strict=True)) / total
    between = sum(weight * (difference - mean) ** 2 for weight, difference in zip(weights, differences, strict=True))
    variance = max(_LEAST_VARIANCE, (prior * within + between) / freedom) / total
    return _Estimate(mean, variance, freedom, blocks[0], blocks[1])


def margin_at_any_time(variance: float, confidence: float, freedom: float = math.inf) -> float:
    """Return how far a difference may be from its estimate, by an interval that holds however often it is looked at.

    It holds the differences that a mixture sequential probability ratio test [1]_ does not reject, with a normal
    mixture of standard deviation `EFFECT`; where the variance is estimated, the t test of the same kind [2]_. With
    the variance V of the estimate, that of the mixture T, A = (V + T) / V, and v degrees of freedom, they are within

        sqrt(V v (B - 1) / (1 - B / A)),    B = (A / (1 - confidence)^2)^(1 / (v + 1)),

    and all of them if B >= A: nothing is known yet.

    References
    ----------
    .. [1] Johari, Koomen, Pekelis and Walsh, "Always Valid Inference: Continuous Monitoring of A/B Tests", Operations
       Research 70(3), 2022.
    .. [2] Wang and Ramdas, "Anytime-Valid t-Tests and Confidence Sequences for Gaussian Means with Unknown Variance",
       Sequential Analysis 44(1), 2025.
    """
    if math.isinf(variance):
        return math.inf
    ratio = (variance + EFFECT**2) / variance
    bound = math.log(ratio) - 2.0 * math.log(1.0 - confidence)
    if math.isinf(freedom):
        return math.sqrt(variance * bound * ratio / (ratio - 1.0))
    grown = math.exp(bound / (freedom + 1.0))
    if grown >= ratio:
        return math.inf
    return math.sqrt(variance * freedom * (grown - 1.0) / (1.0 - grown / ratio))


_PRIOR_FREEDOM: Final = 8.0
"""Differences between groups that outweigh the variance within groups."""
_LEAST_VARIANCE: Final = 1e-6
_MOST_GROUPS: Final = 48
_RECENT: Final = 2
"""Last groups that show a change."""
_CHANGED: Final = 0.99
_WIDEST: Final = 0.2
"""Margin above which it is too early to tell, unless even so the interval excludes 1."""
