"""Differences in percent with their intervals: bars, cells of tables, and their marks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from lab.report.charts import Bar, bar_chart
from lab.report.page import figure

EXPLAINED = "\u25bc less and \u25b2 more beyond the interval."
"""What the marks in tables mean."""


class Interval(Protocol):
    """An estimate with the ends of its interval."""

    @property
    def value(self) -> float:
        """The estimate."""

    @property
    def low(self) -> float:
        """The lower end."""

    @property
    def high(self) -> float:
        """The upper end."""


def shown(ratio: Interval | None) -> str:
    """Return a ratio as a difference in percent with its interval; a dash without one.

    Examples
    --------
    >>> from lab.evaluate.bootstrap import Interval
    >>> shown(Interval(0.97, 0.95, 0.99)), shown(None)
    ('\u25bc -3.0 (-5.0 to -1.0)', '-')
    """
    if ratio is None:
        return "-"
    value, low, high = (f"{100 * (end - 1):+.1f}" for end in (ratio.value, ratio.low, ratio.high))
    sign = "\u25bc " if ratio.high < 1 else "\u25b2 " if ratio.low > 1 else ""
    return f"{sign}{value} ({low} to {high})"


def mark(ratio: Interval | None, *, less_is_better: bool = True) -> str:
    """Return the CSS class of a cell: `good` or `bad` if the interval is on one side of 1."""
    if ratio is None:
        return "few"
    if ratio.low <= 1 <= ratio.high:
        return ""
    return "good" if (ratio.high < 1) == less_is_better else "bad"


def difference_chart(title: str, ratios: Mapping[str, Interval | None], colors: Mapping[str, str]) -> str:
    """Return a figure of differences in percent by name; empty without any."""
    bars = [
        Bar(name, colors[name], *(100 * (end - 1) for end in (one.value, one.low, one.high)))
        for name, one in ratios.items()
        if one is not None
    ]
    title = f"{title}, difference in %"
    return figure(title, bar_chart(title, bars, reference=0.0, form="+.1f")) if bars else ""
