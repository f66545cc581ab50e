"""Trying what looks worse, to learn whether it is: seldom, and at a price that is bounded."""

from __future__ import annotations

import math
from collections.abc import Sequence

from policies.learned_settings import Exploration


def explore(settings: Exploration, costs: Sequence[float], observations: Sequence[float]) -> list[float]:
    """Return the probability with which each candidate should be chosen; the cheapest has what is left.

    The others are tried in proportion to how little is known of them, and together so seldom that the expected cost of
    this very request rises by no more than the set share: what would cost much is tried little, what costs next to
    nothing up to `most`. As they become known, trying them ebbs.

    Parameters
    ----------
    costs
        Expected cost of each candidate, at least one, none below zero.
    observations
        How often requests like this one were seen on each.
    """
    best = min(range(len(costs)), key=costs.__getitem__)
    chances = [0.0] * len(costs)
    chances[best] = 1.0
    if len(costs) == 1 or settings.share == 0 or settings.most == 0:
        return chances
    doubts = [1.0 / math.sqrt(1.0 + seen / _KNOWN) for seen in observations]
    doubts[best] = 0.0
    total = sum(doubts)
    if total == 0:  # everything is known without trying
        return chances
    extra = sum(doubt * (cost - costs[best]) for doubt, cost in zip(doubts, costs, strict=True)) / total
    chance = settings.most * max(doubts)
    if extra > 0:
        chance = min(chance, settings.share * costs[best] / extra)
    for place, doubt in enumerate(doubts):
        if place != best:
            chances[place] = chance * doubt / total
    chances[best] = 1.0 - chance
    return chances


_KNOWN = 5.0
"""Observations from which doubt begins to fall."""
