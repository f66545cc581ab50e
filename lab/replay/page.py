"""A replay as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lab.past.check import HEADINGS, Past
from lab.replay.comparison import Key, Traits, parts, reference_of
from lab.replay.simulate import Replayed
from lab.report.distributions import METRICS, Looks, distribution
from lab.report.page import figures, legend, listed, page, section, table
from lab.statistics import Interval

_SERIES = 8  # colours of lines in the dashboard's `tokens.css`


@dataclass(frozen=True, slots=True)
class Rows:
    """What the page draws."""

    # Result by policy or endpoint; those without a served request are left out of the charts.
    played: Mapping[str, Replayed]
    traits: Traits  # of all requests of the trace
    # Ratios to the reference with their intervals, as of `lab.replay.comparison.intervals`.
    compared: Mapping[Key, Interval]
    past: Past | None = None  # of a simulated replay


def replay_page(document: Mapping[str, Any], rows: Rows) -> str:
    """Return the page of a replay as HTML."""
    trace = ", ".join(document["trace"])
    live = document.get("live")
    where, names_of = "on simulated replicas", "policy"
    if live:
        names_of = "endpoint"
        where = (
            f"sent to {', '.join(dict.fromkeys(live.values()))}{', stopped early' if document['interrupted'] else ''}"
        )
    drawn = _Page(document, rows, names_of)
    facts = [
        document["verdict"],
        *([] if rows.past is None else [str(rows.past.pool)]),
        f"gateway replay of {trace}: {document['requests']:,} requests, {where}",
        f"after a warm-up of {document['warmup']:,} requests; seed {document['seed']}",
    ]
    return page(f"gateway replay of {trace}", document["model"], facts, drawn.sections())


class _Page:
    """The sections of the page."""

    def __init__(self, document: Mapping[str, Any], rows: Rows, names_of: str) -> None:
        self._figures: Mapping[str, Mapping[str, Any]] = document["policies"]
        self._rows, self._names_of = rows, names_of
        self._played = {name: one for name, one in rows.played.items() if len(one.e2e_s)}
        self._looks = looks(rows.played)
        self._reference = reference_of(list(self._played)) if len(self._played) > 1 else None

    def sections(self) -> Iterator[str]:
        """Yield the HTML of each."""
        past = self._rows.past
        if past is not None and past.replicas:
            yield section(
                "Recorded beside replayed",
                table("Recorded beside replayed", HEADINGS, map(past.row, past.replicas)),
                note="Mean times of the same requests, each replayed to where and when it was sent.",
            )
        if len(self._rows.played) > 1:
            yield legend(self._looks, f"Colour of each {self._names_of}")
        yield self._side_by_side()
        if self._played:
            yield section("Distributions", distributions(self._played, self._names_of, self._looks))
            yield self._parts()
        yield self._totals()
        yield section("Notes", listed(self._notes()))

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
            return (
                "There are no intervals: requests of one run share queues, so their spread does not say what another "
                "run would give."
            )
        if self._names_of == "endpoint":
            return "The 95% intervals come from parts of each run; they say nothing of what differs between whole runs."
        return (
            "The 95% intervals come from replays of other traffic like this, drawn from the trace in blocks: they say "
            "what another such trace would give, with other draws."
        )

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

    def _totals(self) -> str:
        backends = list(dict.fromkeys(backend for one in self._figures.values() for backend in one["shares"]))
        headings = ["requests", "errors", "tokens/s", "goodput, requests/s", *(f"to {backend}" for backend in backends)]
        rows = [
            [
                name,
                *(f"{one['requests']:,}", f"{one['errors']:,}", f"{one['output_tokens_per_s']:,.0f}"),
                f"{one['goodput']:.2f}",
                *(f"{one['shares'].get(backend, 0.0):.1%}" for backend in backends),
            ]
            for name, one in self._figures.items()
        ]
        return section("Requests and choices", table("Requests", [self._names_of, *headings], rows))

    def _notes(self) -> Iterator[str]:
        for name, one in self._figures.items():
            for kind, count in one.get("failures", {}).items():
                yield f"{name}: {count:,} failed: {kind}"
            yield from (f"{name}: {line}" for line in one.get("notes", ()))


def looks(names: Iterable[str]) -> Looks:
    """Return name, colour and dash pattern of each line."""
    return [(name, f"var(--s{index % _SERIES + 1})", index) for index, name in enumerate(names)]


def distributions(played: Mapping[str, Replayed], names_of: str, lines: Looks) -> str:
    """Return a figure for each time."""
    return figures(
        *(
            distribution(metric, {name: getattr(one, metric) for name, one in played.items()}, lines, names_of)
            for metric in METRICS
        )
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
