"""Distributions of times, as chart lines and table rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lab.report.charts import ChartLine, line_chart
from lab.report.page import figure, table
from lab.statistics import STATISTICS, Floats, cell, summary

METRICS = {
    "e2e_s": ("Time to finish", "seconds", 1.0),
    "ttft_s": ("Time to first token", "seconds", 1.0),
    "tpot_s": ("Time per output token", "milliseconds", 1e3),
}
"""Title, unit and factor from seconds, by the name of a time."""

Looks = Sequence[tuple[str, str, int]]
"""Name, color and dash pattern of lines."""

SHARES = (*range(1, 100), 99.5, 99.9)
"""Percentages of a distribution to draw; the outermost requests would stretch the axis."""

_FEW = 1000  # values, below which the last percent says little


def ecdf(values: Floats) -> list[tuple[float, float]]:
    """Return points (value, percentage at or below) of a distribution; none without values.

    Values below a microsecond count as one microsecond, so that the axis can be logarithmic.

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


def distribution(metric: str, values: Mapping[str, Floats], looks: Looks, names_of: str) -> str:
    """Return the distributions of a time as a figure with a table of statistics; empty without values."""
    title, unit, factor = METRICS[metric]
    lines = [
        ChartLine(name, color, [(factor * value, share) for value, share in points], dash)
        for name, color, dash in looks
        if name in values and (points := ecdf(values[name]))
    ]
    if not lines:
        return ""
    title = f"{title}, {unit}"
    rows = [
        [name, f"{len(own):,}", *(cell(value, factor=factor) for value in summary(own).values())]
        for name, own in values.items()
    ]
    chart = line_chart(title, lines, f"{unit}, logarithmic")
    return figure(title, chart, table(title, [names_of, "requests", *STATISTICS], rows))
