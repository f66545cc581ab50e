"""By how much more or less a traffic takes than what was learned says, as the requests in time show it."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from gateway.rooms.fleet.demand import DAY_MINUTES, SHORT_MINUTES

MISSES: Final = 0.01
"""Share of the requests that may miss the targets."""
MOST: Final = 3.0
_GAIN: Final = 0.5
_BUSY: Final = 0.75
"""Saturation from which on few misses say that less would do."""
_LEARNING_MINUTES: Final = 15
_FORGETTING_MINUTES: Final = 7 * DAY_MINUTES


class Correction:
    """A factor on all that a traffic takes.

    It moves each minute by how far the misses are from their share, and so finds it in the long run, whatever is wrong
    with the formulas: Gibbs and Candès, "Adaptive Conformal Inference Under Distribution Shift", NeurIPS 2021. It stays
    where misses say nothing about it: many of them where the replicas were too few, and few where they were too many.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._hopeless = 0.0  # share of the requests that miss the targets at the largest factor, so on any number
        self._busy: deque[float] = deque(maxlen=SHORT_MINUTES)

    def update(self, judged: float, missed: float, saturation: float) -> None:
        """Correct by what ended within a minute.

        Parameters
        ----------
        judged, missed
            Requests that kept or missed the targets, and those that missed them.
        saturation
            Load of the replicas that were up before, with the factor.
        """
        if not math.isnan(saturation):
            self._busy.append(saturation)
        if not judged or not self._busy:
            return
        share, busiest = missed / judged, max(self._busy)
        if self.factor > 0.9 * MOST and busiest <= 1.0:
            self._hopeless += (share - self._hopeless) / _LEARNING_MINUTES
        else:
            self._hopeless *= 1.0 - 1.0 / _FORGETTING_MINUTES
        excess = share - MISSES - self._hopeless
        if busiest <= 1.0 if excess > 0.0 else busiest > _BUSY:
            self.factor = min(MOST, max(1.0 / MOST, self.factor * math.exp(_GAIN * excess)))
