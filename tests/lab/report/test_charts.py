"""Charts: what is drawn where, and the parts of a page."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest

from lab.report.charts import Area, Line, area_chart, line_chart
from lab.report.colors import backend_colors
from lab.report.distributions import ecdf, time_axis, time_edges
from lab.report.page import figure, page, section, table
from lab.report.scale import MAX_TICKS, Axis, Scale
from tests.support.report import ReportPage


@pytest.mark.parametrize("logarithmic", [True, False])
@pytest.mark.parametrize("values", [(0.004, 0.2), (3.0, 3.0), (0.7, 91_000.0), (1e-6, 1.0)])
def test_an_axis_has_few_ticks_within_its_ends(values: tuple[float, float], logarithmic: bool) -> None:
    scale = Scale(values, Axis("", logarithmic=logarithmic), 10.0, 110.0)
    assert 1 <= len(scale.ticks) <= MAX_TICKS + 1
    assert all(10.0 - 1e-6 <= scale(tick) <= 110.0 + 1e-6 for tick in (*scale.ticks, *values))


def test_layers_of_a_stack_fill_it() -> None:
    areas = [Area("a", "var(--s1)", [0.25, 1.0, 0.0]), Area("b", "var(--s2)", [0.75, 0.0, 0.0])]
    drawn = ElementTree.fromstring(area_chart("Choices", areas, [0.0, 1.0, 2.0, 3.0], Axis("s")))
    heights = [float(rect.attrib["height"]) for rect in drawn.iter("rect")]
    assert len(heights) == 3  # an interval without requests is empty
    assert heights[0] + heights[2] == pytest.approx(heights[1], abs=0.2)
    assert heights[2] == pytest.approx(3 * heights[0], abs=0.3)


def test_lines_of_a_distribution_rise_to_the_top() -> None:
    points = ecdf(np.array([np.nan, *np.geomspace(0.01, 10, 5000)]))
    assert [share for _, share in points[-2:]] == [99.5, 99.9]
    assert {share: value for value, share in points}[50] == pytest.approx(0.316, rel=0.01)
    assert ecdf(np.array([np.nan])) == []
    assert ecdf(np.zeros(3))[0] == (1e-6, 1)  # so that the axis can be logarithmic
    drawn = line_chart("Times", [Line("a", "var(--s1)", points)], Axis("s", logarithmic=True), Axis("%"))
    assert "nan" not in drawn


def test_the_unit_of_time_suits_the_span() -> None:
    units = []
    for end_s in (90.0, 3600.0, 86400.0, 7 * 86400.0):
        axis, at = time_axis(time_edges(5.0, 5.0 + end_s))
        units.append((axis.label.split()[0], round(float(at[-1]))))
    assert units == [("seconds", 90), ("minutes", 60), ("hours", 24), ("days", 7)]


def test_backends_of_one_method_differ_in_color() -> None:
    colors = backend_colors({"a": "eagle3", "b": "eagle3", "c": "medusa", "d": None})
    assert len(set(colors.values())) == 4
    assert colors["a"] == "var(--m-eagle3)"


def test_a_page_escapes_what_others_named() -> None:
    bad = '<img src=x onerror=alert(1)>"'
    rows = table(bad, [bad, "n"], [[bad, bad]], ["bad"])
    html = page(
        bad,
        bad,
        [bad],
        [section(bad, figure(bad, line_chart(bad, [Line(bad, "red", [(1.0, 1.0)])], Axis(bad), Axis(bad)), data=rows))],
    )
    assert "<img" not in html
    read = ReportPage(html.replace("src=x", ""))
    assert read.tables[bad.replace("src=x", "")][1][1].startswith("<img")
