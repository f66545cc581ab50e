"""Trying what looks worse, to learn whether it is: seldom, and at a price that is bounded."""

from __future__ import annotations

import math
from typing import Final

from policies.learned.propensity import place_of_least


def explore(share: float, most: float, costs: list[float], observations: list[float]) -> list[float]:
    """Return the probability with which each candidate should be chosen; the cheapest has what is left.

    The others are tried in proportion to how little is known of them, and together so seldom that the expected cost of
    this very request rises by no more than the set share: what would cost much is tried little, what costs next to
    nothing up to `most`. As they become known, trying them ebbs.

    Parameters
    ----------
    share, most
        As in `policies.learned.settings.Exploration`.
    costs
        Expected cost of each candidate, at least one, none below zero.
    observations
        How often requests like this one were seen on each.
    """
    best = place_of_least(costs)
    propensities = [0.0] * len(costs)
    propensities[best] = 1.0
    if len(costs) == 1 or share == 0 or most == 0:
        return propensities
    least = costs[best]
    total = largest = dearer = 0.0
    for place, seen in enumerate(observations):  # one loop, not sums over generators: it runs for each request
        if place != best:
            doubt = 1.0 / math.sqrt(1.0 + seen / _KNOWN)
            propensities[place] = doubt
            total += doubt
            dearer += doubt * (costs[place] - least)
            largest = max(largest, doubt)
    if total == 0:  # everything is known without trying
        return propensities
    chance = most * largest
    if dearer > 0:
        chance = min(chance, share * least / (dearer / total))
    for place, doubt in enumerate(propensities):
        if place != best:
            propensities[place] = chance * doubt / total
    propensities[best] = 1.0 - chance
    return propensities


_KNOWN: Final = 5.0
"""Observations from which doubt begins to fall."""
