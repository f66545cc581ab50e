"""Exploration at a bounded price: trying backends that look worse, to learn whether they are."""

from __future__ import annotations

import math
from typing import Final

from policies.learned.propensity import argmin


def explore(share: float, most: float, costs: list[float], observations: list[float]) -> list[float]:
    """Return the probability of choosing each candidate; the cheapest gets what the others leave.

    The other candidates are explored in proportion to their uncertainty. Their total probability is at most `most`, and
    so low that the expected cost of this request rises by no more than `share`: an expensive candidate is explored less
    than a cheap one. Exploration fades as observations accumulate.

    Examples
    --------
    >>> explore(0.01, 0.05, costs=[1.0, 2.0], observations=[0, 0])
    [0.99, 0.01]
    """
    best = argmin(costs)
    propensities = [0.0] * len(costs)
    propensities[best] = 1.0
    if len(costs) == 1 or share == 0 or most == 0:
        return propensities
    lowest = costs[best]
    total = largest = excess = 0.0
    for index, count in enumerate(observations):  # one loop instead of sums over generators: this runs per request
        if index != best:
            uncertainty = 1.0 / math.sqrt(1.0 + count / _KNOWN)
            propensities[index] = uncertainty
            total += uncertainty
            excess += uncertainty * (costs[index] - lowest)
            largest = max(largest, uncertainty)
    if total == 0:  # every other candidate has infinite observations
        return propensities
    probability = most * largest
    mean_excess = excess / total
    if mean_excess > 0:  # of costs that differ by next to nothing it may be zero
        probability = min(probability, share * lowest / mean_excess)
    for index, uncertainty in enumerate(propensities):
        if index != best:
            propensities[index] = probability * uncertainty / total
    propensities[best] = 1.0 - probability
    return propensities


_KNOWN: Final = 5.0
"""Number of observations above which the uncertainty falls noticeably."""
