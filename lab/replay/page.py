"""The charts on the page of a replay, in addition to the terminal's output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.replay.comparison import Key, parts, reference_of
from lab.report.distributions import METRICS, distribution
from lab.report.page import figures, legend, section, table
from lab.simulation.simulate import Replayed
from lab.simulation.table import Traits
from lab.statistics import Interval

_SERIES = 8  # line colors in the dashboard's `tokens.css`


@dataclass(frozen=True, slots=True)
class ReplayPage:
    """The charts on the page of a replay."""

    # Result by policy or endpoint; charts omit those without a served request.
    played: Mapping[str, Replayed]
    traits: Traits  # of all requests of the trace
    # Ratios to the reference with their intervals, from `lab.replay.comparison.intervals`.
    compared: Mapping[Key, Interval]
    names_of: str  # what the names denote: `policy` or `endpoint`

    def drawn(self) -> str:
        """Return the HTML of the sections: differences from a reference, distributions, and parts of the traffic."""
        served = {name: one for name, one in self.played.items() if len(one.e2e_s)}
        # Name, color and dash pattern of each line.
        looks = [(name, f"var(--s{at % _SERIES + 1})", at) for at, name in enumerate(self.played)]
        charts = [
            distribution(metric, {name: getattr(one, metric) for name, one in served.items()}, looks, self.names_of)
            for metric in METRICS
        ]
        head = legend(looks, f"Colour of each {self.names_of}") if len(self.played) > 1 else ""
        distributions = section("Distributions", figures(*charts))
        if len(served) < 2:
            return head + distributions
        reference = reference_of(list(served))
        others = [name for name in served if name != reference]
        return head + self._side_by_side(reference, others) + distributions + self._parts(reference, others)

    def _side_by_side(self, reference: str, others: Sequence[str]) -> str:
        rows, marks = [], list[str]()
        for name in others:
            own = [self.compared.get((metric, name)) for metric in METRICS]
            rows.append([name, *map(shown, own)])
            marks += map(mark, own)
        headings = [f"difference in %, {self.names_of}", *(title for title, *_ in METRICS.values())]
        return section(
            f"Against {reference}",
            table(f"Differences from {reference}, %", headings, rows, marks),
            note=f"Mean times against those of {reference}, on the requests that both served; less is faster. "
            f"{self._intervals()} \u25bc less and \u25b2 more beyond the interval.",
        )

    def _intervals(self) -> str:
        if not any(one.is_known for one in self.compared.values()):
            return "There are no intervals: requests of one run share queues, and do not say what another would give."
        if self.names_of == "endpoint":
            return "The 95% intervals come from parts of each run; they say nothing of what differs between whole runs."
        return "The 95% intervals come from replays of other traffic like this, drawn from the trace in blocks."

    def _parts(self, reference: str, others: Sequence[str]) -> str:
        rows, marks = [], []
        for part in parts(self.played[reference], self.traits):
            found = [self.compared.get((*part.key, name)) for name in others]
            rows.append([f"{part.by}: {part.name}", f"{int(part.inside.sum()):,}", *map(shown, found)])
            marks += ["", *map(mark, found)]
        if not rows:
            return ""
        return section(
            f"Where it gains and loses against {reference}",
            table("Time to finish by part, difference in %", ["difference in %", "requests", *others], rows, marks),
            note="Mean time to finish against the same requests under the reference, by what the requests were like. "
            f"{self._intervals()} One in twenty is expected to miss.",
        )


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


def mark(ratio: Interval | None) -> str:
    """Return the CSS class of a cell: `good` or `bad` if the interval is on one side of 1."""
    if ratio is None or not ratio.is_known:
        return "few"
    return "good" if ratio.high < 1 else "bad" if ratio.low > 1 else ""
