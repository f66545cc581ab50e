"""What the page of a replay draws besides what stands on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lab.replay.comparison import Key, parts, reference_of
from lab.report.distributions import METRICS, distribution
from lab.report.page import figures, legend, section, table
from lab.simulation.simulate import Replayed
from lab.simulation.table import Traits
from lab.statistics import Interval

_SERIES = 8  # colours of lines in the dashboard's `tokens.css`


@dataclass(frozen=True, slots=True)
class PageData:
    """What the page draws."""

    # Result by policy or endpoint; those without a served request are left out of the charts.
    played: Mapping[str, Replayed]
    traits: Traits  # of all requests of the trace
    # Ratios to the reference with their intervals, as of `lab.replay.comparison.intervals`.
    compared: Mapping[Key, Interval]

    def drawn(self, names_of: str) -> str:
        """Return the HTML of the sections: differences from a reference, distributions, and parts of the traffic."""
        return _Page(self, names_of).sections()


class _Page:
    """The sections of the page."""

    def __init__(self, rows: PageData, names_of: str) -> None:
        self._rows, self._names_of = rows, names_of
        self._played = {name: one for name, one in rows.played.items() if len(one.e2e_s)}
        # Name, colour and dash pattern of each line.
        self._looks = [(name, f"var(--s{at % _SERIES + 1})", at) for at, name in enumerate(rows.played)]
        self._reference = reference_of(list(self._played)) if len(self._played) > 1 else None

    def sections(self) -> str:
        """Return the HTML of all."""
        several = len(self._rows.played) > 1
        return (
            (legend(self._looks, f"Colour of each {self._names_of}") if several else "")
            + self._side_by_side()
            + section("Distributions", figures(*map(self._distribution, METRICS)))
            + self._parts()
        )

    def _distribution(self, metric: str) -> str:
        values = {name: getattr(one, metric) for name, one in self._played.items()}
        return distribution(metric, values, self._looks, self._names_of)

    def _side_by_side(self) -> str:
        if self._reference is None:
            return ""
        compared = self._rows.compared
        others = [name for name in self._played if name != self._reference]
        found = {metric: {name: compared.get((metric, name)) for name in others} for metric in METRICS}
        rows, marks = [], []
        for name in others:
            own = [found[metric][name] for metric in METRICS]
            rows.append([name, *map(shown, own)])
            marks += [mark(one) for one in own]
        titles = [METRICS[metric][0] for metric in METRICS]
        return section(
            f"Against {self._reference}",
            table(
                f"Differences from {self._reference}, %", [f"difference in %, {self._names_of}", *titles], rows, marks
            ),
            note=f"Mean times against those of {self._reference}, on the requests that both served; less is faster. "
            f"{self._intervals()} \u25bc less and \u25b2 more beyond the interval.",
        )

    def _intervals(self) -> str:
        if not any(one.is_known for one in self._rows.compared.values()):
            return "There are no intervals: requests of one run share queues, and do not say what another would give."
        if self._names_of == "endpoint":
            return "The 95% intervals come from parts of each run; they say nothing of what differs between whole runs."
        return "The 95% intervals come from replays of other traffic like this, drawn from the trace in blocks."

    def _parts(self) -> str:
        if self._reference is None:
            return ""
        reference = self._played[self._reference]
        others = [name for name in self._played if name != self._reference]
        rows, marks = [], []
        for part in parts(reference, self._rows.traits):
            found = [self._rows.compared.get((*part.key, name)) for name in others]
            rows.append([f"{part.by}: {part.name}", f"{int(part.inside.sum()):,}", *map(shown, found)])
            marks += ["", *map(mark, found)]
        if not rows:
            return ""
        return section(
            f"Where it gains and loses against {self._reference}",
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
