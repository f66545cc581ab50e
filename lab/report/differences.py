"""Differences in percent with their intervals: bars, cells of tables, and their marks."""

from __future__ import annotations

from collections.abc import Mapping

from lab.report.charts import Bar, bar_chart
from lab.report.page import figure
from lab.statistics import Interval

EXPLAINED = "\u25bc less and \u25b2 more beyond the interval."
"""What the marks in tables mean."""


def shown(ratio: Interval | None) -> str:
    """Return a ratio as a difference in percent with its interval, if it has one; a dash for None.

    Examples
    --------
    >>> shown(Interval(0.97, 0.95, 0.99)), shown(Interval(0.97)), shown(None)
    ('\u25bc -3.0 (-5.0 to -1.0)', '-3.0', '-')
    """
    if ratio is None:
        return "-"
    if not ratio.is_known:
        return f"{100 * (ratio.value - 1):+.1f}"
    value, low, high = (f"{100 * (end - 1):+.1f}" for end in (ratio.value, ratio.low, ratio.high))
    sign = "\u25bc " if ratio.high < 1 else "\u25b2 " if ratio.low > 1 else ""
    return f"{sign}{value} ({low} to {high})"


def mark(ratio: Interval | None, *, less_is_better: bool = True) -> str:
    """Return the CSS class of a cell: `good` or `bad` if the interval is on one side of 1."""
    if ratio is None or not ratio.is_known:
        return "few"
    if ratio.low <= 1 <= ratio.high:
        return ""
    return "good" if (ratio.high < 1) == less_is_better else "bad"


def difference_chart(title: str, ratios: Mapping[str, Interval | None], colors: Mapping[str, str]) -> str:
    """Return a figure of differences in percent by name; empty without any."""
    bars = [Bar.of(name, colors[name], one.less_one(), 100) for name, one in ratios.items() if one is not None]
    title = f"{title}, difference in %"
    return figure(title, bar_chart(title, bars, reference=0.0, form="+.1f")) if bars else ""
