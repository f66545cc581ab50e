"""Charts: what is drawn where, and the parts of a page."""

from __future__ import annotations

import numpy as np
import pytest

from lab.report.charts import MAX_TICKS, ChartLine, Scale, line_chart
from lab.report.distributions import ecdf
from lab.report.page import figure, page, section, table
from tests.support.report import ReportPage


@pytest.mark.parametrize("values", [(0.004, 0.2), (3.0, 3.0), (0.7, 91_000.0), (1e-6, 1.0)])
def test_an_axis_has_few_ticks_within_its_ends(values: tuple[float, float]) -> None:
    scale = Scale(values, 10.0, 110.0)
    assert 1 <= len(scale.ticks) <= MAX_TICKS
    assert all(10.0 - 1e-6 <= scale(tick) <= 110.0 + 1e-6 for tick in (*scale.ticks, *values))


def test_lines_of_a_distribution_rise_to_the_top() -> None:
    points = ecdf(np.array([np.nan, *np.geomspace(0.01, 10, 5000)]))
    assert [share for _, share in points[-2:]] == [99.5, 99.9]
    assert {share: value for value, share in points}[50] == pytest.approx(0.316, rel=0.01)
    assert ecdf(np.array([np.nan])) == []
    assert ecdf(np.zeros(3))[0] == (1e-6, 1)  # so that the axis can be logarithmic
    drawn = line_chart("Times", [ChartLine("a", "var(--s1)", points)], "s")
    assert "nan" not in drawn


def test_a_page_escapes_what_others_named() -> None:
    bad = '<img src=x onerror=alert(1)>"'
    rows = table(bad, [bad, "n"], [[bad, bad]], ["bad"])
    html = page(
        bad,
        bad,
        [bad],
        [section(bad, figure(bad, line_chart(bad, [ChartLine(bad, "red", [(1.0, 1.0)])], bad), rows))],
    )
    assert "<img" not in html
    read = ReportPage(html.replace("src=x", ""))
    assert read.tables[bad.replace("src=x", "")][1][1].startswith("<img")
