"""Compares two arms that take turns by blocks of time, such as a policy and `least_loaded`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain
from typing import Final, NamedTuple

from policies.experiment.curve import GROUP, Fit, Row, fit
from policies.experiment.interval import margin_at_any_time


class Comparison(NamedTuple):
    """The comparison of an arm with its control, by blocks of time."""

    # Seconds per unit of work under the arm over those under its control; NaN while it is too early to tell.
    ratio: float
    # low, high: interval of the ratio, NaN with it.
    low: float
    high: float
    # own, control: compared blocks of each.
    own: int
    control: int


class Turns:
    """Blocks of time, each of which belongs to an arm or to its control: a switchback experiment [1]_.

    Blocks are compared only within groups of neighbors, so groups with one arm are left out.

    Parameters
    ----------
    forgets
        Whether to forget groups that are old, or contradicted by the last ones.

    References
    ----------
    .. [1] Bojinov, Simchi-Levi and Zhao, "Design and Analysis of Switchback Experiments", Management Science 69(7),
       2023.
    """

    def __init__(self, *, forgets: bool = True) -> None:
        self._forgets = forgets
        self._groups: dict[int, list[Row]] = {}  # oldest first
        self._found: Fit | None = None
        self._is_new = False  # whether blocks were added since the last fit

    def add(self, number: int, seconds_per_work: float, arrived_work: float, *, control: bool) -> None:
        """Add a block."""
        group = number // GROUP
        if self._forgets and group not in self._groups:
            self._forget()
        self._groups.setdefault(group, []).append(Row(number, int(control), seconds_per_work, arrived_work))
        self._is_new = True

    def comparison(self, confidence: float) -> Comparison:
        """Return the ratio with an interval that holds however often one looks."""
        compared = self._compared().values()
        if self._is_new:
            self._found, self._is_new = _fit(compared), False
        control = sum(row.arm for rows in compared for row in rows)
        blocks = sum(map(len, compared)) - control, control
        if self._found is not None:
            _, _, ratio, low, high = self._found.overall(confidence)
            difference = abs(math.log(ratio))
            if low > 0.0 and math.log(high / ratio) <= max(_WIDEST, difference):
                return Comparison(ratio, low, high, *blocks)
        return Comparison(math.nan, math.nan, math.nan, *blocks)

    def _compared(self) -> dict[int, list[Row]]:
        """Return the groups with both arms."""
        return {number: rows for number, rows in self._groups.items() if len({row.arm for row in rows}) == 2}

    def _forget(self) -> None:
        """Forget groups with one arm, the oldest ones, and if the last ones show a change, all earlier ones."""
        groups = [*self._compared().items()]
        before, recent = (_fit(rows for _, rows in part) for part in (groups[:-_RECENT], groups[-_RECENT:]))
        kept = _MOST_GROUPS
        if before is not None and recent is not None:
            variance = before.log_variance + recent.log_variance
            margin = margin_at_any_time(variance, _CHANGED, min(before.freedom, recent.freedom))
            if abs(recent.log_ratio - before.log_ratio) > margin:
                kept = _RECENT
        self._groups = dict(groups[-kept:])


def _fit(groups: Iterable[list[Row]]) -> Fit | None:
    return fit([*chain.from_iterable(groups)])


_MOST_GROUPS: Final = 48
_RECENT: Final = 2
"""Number of last groups that may show a change."""
_CHANGED: Final = 0.99
_WIDEST: Final = 0.2
"""Margin above which it is too early to tell, unless even so the interval excludes 1."""
