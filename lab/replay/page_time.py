"""The part of a replay's page that shows load and choices over time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from lab.replay.comparison import in_flight
from lab.replay.simulate import Replayed
from lab.report.charts import Area, Line, area_chart
from lab.report.colors import backend_colors
from lab.report.distributions import every, line_figure, time_axis, time_edges
from lab.report.page import figure, figures, legend, section, table
from lab.report.scale import Axis, number
from lab.statistics import Floats


def load_over_time(played: Mapping[str, Replayed], colors: Mapping[str, str], dashes: Mapping[str, int]) -> str:
    """Return a section with requests in flight, output tokens and arrivals over time."""
    edges = _edges(played.values())
    middle, width_s = (edges[1:] + edges[:-1]) / 2, float(edges[1] - edges[0])
    waiting = {name: in_flight(one, middle).astype(float) for name, one in played.items()}
    tokens = {
        name: np.histogram(one.arrived_s + one.e2e_s, edges, weights=one.output_tokens)[0] / width_s
        for name, one in played.items()
    }
    most = max(played.values(), key=lambda one: len(one.arrived_s))
    arrivals = {"arrivals": np.histogram(most.arrived_s, edges)[0] / width_s}
    courses = {
        "Requests in flight": waiting,
        "Output tokens per second": tokens,
        "Requests per second": arrivals,
    }
    return section(
        "Load over time",
        figures(*(_course(title, values, edges, colors, dashes) for title, values in courses.items())),
        note="The tokens of an answer count when it ends.",
    )


def _course(
    title: str, values: Mapping[str, Floats], edges: Floats, colors: Mapping[str, str], dashes: Mapping[str, int]
) -> str:
    axis, at = time_axis(edges)
    middle = ((at[1:] + at[:-1]) / 2).tolist()
    lines = [
        Line(name, colors.get(name, "var(--accent)"), list(zip(middle, one.tolist(), strict=True)), dashes.get(name, 0))
        for name, one in values.items()
    ]
    return line_figure(title, lines, axis, Axis("", from_zero=True))


def choices_over_time(played: Mapping[str, Replayed], backends: Mapping[str, Mapping[str, str | None]]) -> str:
    """Return a section with the share of each backend over time, a chart for each policy; empty if none is known."""
    methods = {name: method for one in backends.values() for name, method in one.items()}
    colors = backend_colors(methods)
    drawn = []
    edges = _edges(played.values())
    axis, at = time_axis(edges)
    for policy, one in played.items():
        if not (own := backends[policy]):
            continue
        counts = np.zeros((len(edges) - 1, len(own)))
        bins = np.clip(np.searchsorted(edges, one.arrived_s, side="right") - 1, 0, len(counts) - 1)
        np.add.at(counts, (bins, one.backend), 1)
        shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        areas = [Area(name, colors[name], shares[:, index].tolist()) for index, name in enumerate(own)]
        title = f"Choices of {policy}"
        rows = [
            [number(t), *(f"{share:.0%}" for share in row)] for t, row in zip(at[:-1].tolist(), shares, strict=True)
        ]
        data = table(title, [axis.label, *own], every(rows))
        drawn.append(figure(title, area_chart(title, areas, at.tolist(), axis), data=data))
    if not drawn:
        return ""
    entries = [
        (f"{name} ({method})" if (method := methods[name]) and method != name else name, color, None)
        for name, color in colors.items()
    ]
    return section("Choices over time", legend(entries, title="Colour of each backend"), figures(*drawn))


def _edges(played: Iterable[Replayed]) -> Floats:
    each = list(played)
    begin_s = min(float(one.arrived_s.min()) for one in each)
    return time_edges(begin_s, max(float((one.arrived_s + one.e2e_s).max()) for one in each))
