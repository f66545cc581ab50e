"""The comparison of a fleet after a change with the fleet before it, on the same kinds of requests at the same load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from policies.guarded.gain import margin_at_any_time

BLOCK_S = 300.0
"""Requests of the same five minutes meet the same queues: they count as one draw."""
_LEAST = 5
_LEAST_BLOCKS = 6
_LEAST_SHARE = 0.5
_LEAST_FAILED = 10


@dataclass(frozen=True, slots=True)
class Seen:
    """One finished request.

    Parameters
    ----------
    stratum
        Its kind, and the load when it arrived.
    value
        Logarithm of its seconds per unit of work; NaN if the engines failed it.
    """

    at_s: float
    stratum: tuple[object, ...]
    value: float


_Groups = dict[tuple[object, ...], list[Seen]]


@dataclass(frozen=True, slots=True)
class Compared:
    """Seconds per unit of work after a change over those before it.

    Parameters
    ----------
    ratio, low, high
        The ratio with its interval, which holds however often it is looked at; NaN if there is too little to compare.
    matched
        Share of the later requests whose kind and load also occurred before.
    failed_before, failed_after
        Share of the requests that engines failed.
    fails_more
        Whether that is more than before, beyond chance.
    """

    ratio: float
    low: float
    high: float
    matched: float
    failed_before: float
    failed_after: float
    fails_more: bool

    def is_loss(self, tolerance: float) -> bool:
        """Return whether the fleet is worse than before, with confidence, by more than `tolerance`."""
        return self.fails_more or self.low > 1.0 + tolerance

    def __str__(self) -> str:
        """Return it in words."""
        if math.isnan(self.low):
            return f"not comparable yet: {self.matched:.0%} of the requests have their like before the change"
        times = f"{self.ratio:.3f} times the seconds per token ({self.low:.3f} to {self.high:.3f})"
        failed = f"; engines failed {self.failed_after:.2%}, {self.failed_before:.2%} before" if self.fails_more else ""
        return f"{times}, on the {self.matched:.0%} of the requests that have their like before{failed}"


def compare(before: Sequence[Seen], after: Sequence[Seen], confidence: float = 0.99) -> Compared:
    """Compare two periods.

    Within each stratum the means of the logarithms are subtracted; the strata are weighted as they occur after the
    change. The variance is that of the sums of influences by block of time [1]_, so it holds although neighbours wait
    in the same queue. The interval is that of the guardrail, valid at every look.

    References
    ----------
    .. [1] Liang and Zeger, "Longitudinal Data Analysis Using Generalized Linear Models", Biometrika 73(1), 1986.
    """
    groups: tuple[_Groups, _Groups] = ({}, {})
    failed = [0, 0]
    for number, period in enumerate((before, after)):
        for one in period:
            if math.isnan(one.value):
                failed[number] += 1
            else:
                groups[number].setdefault(one.stratum, []).append(one)
    failed_before, failed_after = failed[0] / max(1, len(before)), failed[1] / max(1, len(after))
    fails_more = failed[1] >= _LEAST_FAILED and _least_share(failed[1], len(after)) > _most_share(
        failed[0], len(before)
    )
    strata = [key for key in groups[1] if min(len(groups[1][key]), len(groups[0].get(key, ()))) >= _LEAST]
    matched = sum(len(groups[1][key]) for key in strata)
    share = matched / max(1, sum(map(len, groups[1].values())))
    nothing = Compared(math.nan, math.nan, math.nan, share, failed_before, failed_after, fails_more)
    if share < _LEAST_SHARE:
        return nothing
    difference = 0.0
    blocks: tuple[dict[int, float], dict[int, float]] = ({}, {})
    for key in strata:
        weight = len(groups[1][key]) / matched
        for number, sign in ((0, -1.0), (1, 1.0)):
            values = np.array([one.value for one in groups[number][key]])
            mean = float(values.mean())
            difference += sign * weight * mean
            for one, deviation in zip(groups[number][key], values - mean, strict=True):
                block = int(one.at_s // BLOCK_S)
                blocks[number][block] = blocks[number].get(block, 0.0) + weight * float(deviation) / len(values)
    if min(map(len, blocks)) < _LEAST_BLOCKS:
        return nothing
    variance = sum(len(one) / (len(one) - 1) * sum(value**2 for value in one.values()) for one in blocks)
    margin = margin_at_any_time(max(variance, 1e-9), confidence)
    ratio, low, high = (math.exp(difference + sign * margin) for sign in (0.0, -1.0, 1.0))
    return Compared(ratio, low, high, share, failed_before, failed_after, fails_more)


def _least_share(count: int, of: int) -> float:
    return _wilson(count, of, -1.0)


def _most_share(count: int, of: int) -> float:
    return _wilson(count, of, 1.0)


def _wilson(count: int, of: int, sign: float, z: float = 3.3) -> float:
    """Return a bound of Wilson's interval of a share; with z = 3.3, of one in a thousand on each side."""
    if not of:
        return 1.0 if sign > 0 else 0.0
    share = count / of
    middle = share + z * z / (2 * of)
    reach = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return (middle + sign * reach) / (1 + z * z / of)
