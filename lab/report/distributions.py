"""Distributions and courses of time, as lines of charts and rows of tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lab.report.charts import Line, line_chart
from lab.report.page import figure, table
from lab.report.scale import Axis, number
from lab.statistics import STATISTICS, Floats, summary

METRICS = {
    "e2e_s": ("Time to finish", "seconds", 1.0),
    "ttft_s": ("Time to first token", "seconds", 1.0),
    "tpot_s": ("Time per output token", "milliseconds", 1e3),
}
"""Title, unit and factor from seconds, by the name of a time."""

SHARES = (*range(1, 100), 99.5, 99.9)
"""Percentages of a distribution that are drawn; the outermost requests would stretch the axis."""

PERCENT = Axis("% at or below", at=(0, 25, 50, 75, 100), span=(0, 100))
"""The axis of the percentages of a distribution."""

_FEW = 1000  # values, below which the last percent says little
_INTERVALS = 48
_UNITS = (
    (2 * 86400.0, "days", 86400.0),
    (2 * 3600.0, "hours", 3600.0),
    (180.0, "minutes", 60.0),
    (0.0, "seconds", 1.0),
)


def ecdf(values: Floats) -> list[tuple[float, float]]:
    """Return points (value, percentage at or below) of a distribution; none without values.

    Values below a microsecond count as one, so that the axis can be logarithmic.

    Examples
    --------
    >>> ecdf(np.arange(101.0))[49]
    (50.0, 50)
    """
    values = values[~np.isnan(values)]
    if not len(values):
        return []
    shares = SHARES if len(values) >= _FEW else SHARES[:99]
    at = np.maximum(np.percentile(values, shares), 1e-6)
    return list(zip(at.tolist(), shares, strict=True))


def summary_cells(values: Floats, factor: float = 1.0) -> list[str]:
    """Return mean, median, 90th and 99th percentile as text; dashes without values.

    Examples
    --------
    >>> summary_cells(np.array([1.0, 2.0, 3.0]))
    ['2.000', '2.000', '2.800', '2.980']
    """
    return ["-" if value is None else f"{factor * value:.3f}" for value in summary(values).values()]


def time_edges(begin_s: float, end_s: float) -> Floats:
    """Return the ends of the intervals of time that a chart shows, one more than there are intervals."""
    return np.linspace(begin_s, max(end_s, begin_s + 1e-3), _INTERVALS + 1)


def time_axis(edges: Floats) -> tuple[Axis, Floats]:
    """Return an axis from 0 in a unit that suits the span, and the edges on it."""
    span_s = float(edges[-1] - edges[0])
    _, unit, size_s = next(one for one in _UNITS if span_s >= one[0])
    return Axis(f"{unit} after the first request", span=(0.0, span_s / size_s)), (edges - edges[0]) / size_s


def every(rows: Sequence[Sequence[str]], most: int = 12) -> list[Sequence[str]]:
    """Return at most about `most` of the rows, evenly spaced, for a table that is read and not searched.

    Examples
    --------
    >>> [row[0] for row in every([[str(n)] for n in range(48)], 4)]
    ['0', '12', '24', '36']
    """
    return list(rows[:: max(1, -(-len(rows) // most))])


def distribution(
    metric: str, values: Mapping[str, Floats], colors: Mapping[str, str], dashes: Mapping[str, int], names_of: str
) -> str:
    """Return the distributions of a time as a figure with their statistics in a table; empty without values."""
    title, unit, factor = METRICS[metric]
    lines = [
        Line(name, colors[name], [(factor * value, share) for value, share in points], dashes[name])
        for name, own in values.items()
        if (points := ecdf(own))
    ]
    if not lines:
        return ""
    title = f"{title}, {unit}"
    rows = [[name, f"{len(own):,}", *summary_cells(own, factor)] for name, own in values.items()]
    chart = line_chart(title, lines, Axis(f"{unit}, logarithmic", logarithmic=True), PERCENT)
    return figure(title, chart, data=table(title, [names_of, "requests", *STATISTICS], rows))


def line_figure(title: str, lines: Sequence[Line], x: Axis, y: Axis) -> str:
    """Return lines as a figure with their values in a table; empty without lines."""
    if not lines:
        return ""
    values = [dict(line.points) for line in lines]
    at = sorted({place for line in lines for place, _ in line.points})
    rows = [[number(place), *(number(own[place]) if place in own else "" for own in values)] for place in at]
    data = table(title, [x.label, *(line.label for line in lines)], every(rows))
    return figure(title, line_chart(title, lines, x, y), data=data)
