"""The draft depth: which k a backend has in force, by batch size."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Final

from backends.draft_schedule import DraftSchedule
from policies.learned.prior import StepCost

Place = tuple[int, float]
"""A k between two levels of a `Depth`: the index of the lower one, and the share of the upper one."""


class Depth:
    """The k in force on a backend whose k depends on the batch.

    Step times and tokens per step are known for each level, and are linear between two: a request that meets both has
    some steps of each. Batches vary while a request runs, so the k of a batch is averaged over those around it.
    """

    def __init__(self, schedule: DraftSchedule) -> None:
        # Whether k is the number of verified drafts, which engines do not report.
        self.adaptive = schedule.adaptive
        ks = schedule.by_batch
        self.levels = sorted(set(ks[1:]))  # values of k in the schedule, ascending; at least two
        last = len(ks) - 1
        while last > 1 and ks[last - 1] == ks[last]:
            last -= 1
        index = {k: float(number) for number, k in enumerate(self.levels)}
        totals = [0.0]
        for batch in range(1, 2 * last + 3 * math.isqrt(last) + 4):
            totals.append(totals[-1] + index[schedule.at(batch)])
        self._positions = [index[schedule.at(1)]]
        while len(self._positions) <= last or self._positions[-1] != index[schedule.at(last)]:
            batch = len(self._positions)
            spread = min(batch - 1, round(SPREAD * math.sqrt(batch)))
            total = totals[batch + spread] - totals[batch - spread - 1]
            self._positions.append(total / (2 * spread + 1))
        self._last = len(self._positions) - 1

    def place(self, batch: float) -> Place:
        """Return the place of the k for a batch of this size."""
        position = self._positions[min(self._last, int(batch + 0.5))]
        return self._at(position)

    def place_of_k(self, k: float) -> Place:
        """Return the place of a mean k."""
        levels = self.levels
        upper = min(len(levels) - 1, max(1, bisect_right(levels, k)))
        below, above = levels[upper - 1], levels[upper]
        return upper - 1, min(1.0, max(0.0, (k - below) / (above - below)))

    def _at(self, position: float) -> Place:
        lower = min(int(position), len(self.levels) - 2)
        return lower, position - lower


def depth_of(schedule: DraftSchedule) -> Depth | None:
    """Return the depth of a backend; None if its k does not depend on the batch."""
    return Depth(schedule) if len({*schedule.by_batch[1:]}) > 1 else None


def between(values: Sequence[float], place: Place) -> float:
    """Return the value at a place, given those of all levels."""
    lower, share = place
    low = values[lower]
    return low + share * (values[lower + 1] - low)


def mixed(costs: Sequence[StepCost], place: Place) -> StepCost:
    """Return the cost of a step at a place, given those of all levels."""
    lower, share = place
    pairs: Any = zip(costs[lower], costs[lower + 1], strict=True)
    return StepCost(*[low + share * (high - low) for low, high in pairs])


SPREAD: Final = 1.0
"""Requests by which a batch varies while a request runs, over the square root of the batch."""
