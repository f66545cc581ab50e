"""The calibration report as a Markdown page, as a table for the terminal, and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from io import StringIO
from math import isnan

from benchmarks.calibration import held_out
from benchmarks.calibration.arithmetic import Row, Summary, summarize
from benchmarks.calibration.cases import Figure, LeftOut
from benchmarks.calibration.run import Report

AIMS = (0.08, 0.9, 0.9)
"""Aims of the reported part: median absolute error, share within 20%, share of groups with the right winner."""

UNLICENSED = frozenset({"vllm012", "apertus", "h100_qwen3_1.7b_verify_cost.csv"})
"""Sources whose tables carry no licence: what is published shows only the errors of their rows."""

_INTRODUCTION = """\
# The simulator compared with measurements

Every published or recorded figure that can be reproduced is simulated in virtual time and compared with the
measurement. This page is made by

    python -m benchmarks.calibration FACTS DATA --write docs

FACTS and DATA are the directories that hold the figures; they are not part of the project. The same command writes
every row to [results.csv](../benchmarks/calibration/results.csv), with its source:
{figures}
What could not be reproduced, and why, is in [left_out.csv](../benchmarks/calibration/left_out.csv). The sources are
named in [the calibrations](simulator.md#calibrations).

- A **setup** is one calibration. A **group** is the runs of one setup, source, workload and load.
- **Two parts.** The groups of a setup, ordered by source, workload and load, are alternately those on which parameters
  may be fitted (`fit`) and those that are only reported (`report`).
- **Two sources of acceptance.** `As measured`, a run accepts what was published for it, so step times are judged.
  `Blind`, acceptance comes from the calibration, or from running the proposer on texts that were available.
- **Speedup** is relative to the baseline of the group: of tokens/s, of a request's tokens/s while it decodes (vLLM
  0.12 metrics), or of the median time between chunks (serving at 2 requests/s).
- **Winners.** The winner is right if the run of a group that is fastest in the simulation is the fastest as measured,
  and nearly right if its measured speed is within 5% of that: ratios between sweeps are no more accurate.
"""

_HELD_OUT = """\
Tokens per second that nothing was fitted on: the reported part, which in the sweeps is every second concurrency; and
adaptive verification, by step times fitted anew to the other runs. The crossing point is the concurrency from which on
a method is slower than none, interpolated; calibrations were fitted on every second concurrency. Curves that cross in
neither or that never pay are left out.

"""

_WORST = """\
The largest error of the reported part, acceptance as measured, in each of the setups where it is largest.

"""

_COLUMNS = (
    *("part", "setup", "source", "workload", "load", "method", "quantity"),
    *("measured", "simulated", "error", "blind", "blind_error"),
)


def document(report: Report, figures: Sequence[Figure], closing: str, plot: str) -> str:
    """Return the whole page.

    Parameters
    ----------
    closing
        Discussion of the results, written by hand.
    plot
        File name of the plot, relative to the page.
    """
    speedups = [row for row in report.rows if row.quantity == "speedup"]
    counted = (
        f"{len(report.rows)} figures of {len({row.group for row in report.rows})} groups, of which {len(speedups)} are "
        f"speedups, and\n{len(figures)} that follow from a formula. Sources without a licence show only their errors."
    )
    sections = [
        _INTRODUCTION.format(figures=counted),
        "## Speedup over the baseline\n\n" + _summaries(report),
        f"![Simulated against measured speedup]({plot})",
        "## Held out: tokens per second, and where speculation stops paying\n\n" + _HELD_OUT + _held_out(report),
        "## Worst cells\n\n" + _WORST + _worst(report),
        closing,
    ]
    return "\n\n".join(section.strip() for section in sections) + "\n"


def terminal(report: Report) -> str:
    """Return the summary tables."""
    by_source, by_setup = (_by(report, key) for key in (lambda row: row.group.source, lambda row: row.group.setup))
    return "\n\n".join((_summaries(report), _held_out(report), by_source, by_setup, _other_quantities(report)))


def _worst(report: Report) -> str:
    lines = ["| setup | workload | load | method | quantity | error |", "|---|---|---|---|---|---|"]
    seen: set[str] = set()
    for row in sorted((row for row in report.rows if row.part == "report"), key=lambda row: -abs(row.error)):
        if row.quantity in ("speedup", "output_tok_s") and row.group.setup not in seen and len(seen) < 8:
            seen.add(row.group.setup)
            setup, _, workload, load = row.group
            lines.append(f"| `{setup}` | {workload} | {load} | {row.label} | {row.quantity} | {row.error:+.0%} |")
    return "\n".join(lines)


def _held_out(report: Report) -> str:
    reported = [row for row in report.rows if row.part == "report"]
    return held_out.tables(reported, report.rows, report.left_out)


def _summaries(report: Report) -> str:
    lines = [
        "| part | acceptance | speedups | median abs. error | within 20% | winner right | nearly | right method |",
        "|---|---|---|---|---|---|---|---|",
        f"| *aim* | | | <= {AIMS[0]:.0%} | >= {AIMS[1]:.0%} | >= {AIMS[2]:.0%} | | |",
    ]
    for part in ("fit", "report"):
        for name, rows in (("as measured", report.rows), ("blind", report.blind)):
            lines.append(f"| {part} | {name} | {_cells(summarize(row for row in rows if row.part == part))} |")
    return "\n".join(lines)


def _cells(summary: Summary) -> str:
    if not summary.rows:
        return "0 | | | | |"
    winners = f"{summary.winners} of {summary.groups} | {summary.nearly} | {summary.methods}"
    return f"{summary.rows} | {summary.median_error:.1%} | {summary.within_20:.0%} | {winners}"


def _by(report: Report, key: Callable[[Row], str]) -> str:
    lines = [
        "| | part | speedups | median abs. error | within 20% | winner right | nearly | right method | blind: median |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in sorted({key(row) for row in report.rows}):
        for part in ("fit", "report"):
            seen, blind = (
                summarize(row for row in rows if key(row) == name and row.part == part)
                for rows in (report.rows, report.blind)
            )
            if seen.rows:
                lines.append(f"| `{name}` | {part} | {_cells(seen)} | {_share(blind.median_error)} |")
    return "\n".join(lines)


def _share(value: float) -> str:
    return "" if isnan(value) else f"{value:.1%}"


def _other_quantities(report: Report) -> str:
    lines = ["| quantity | part | figures | median abs. error | within 20% |", "|---|---|---|---|---|"]
    for quantity in sorted({row.quantity for row in report.rows} - {"speedup", "tokens_per_step"}):
        lines += _of_quantity(quantity, report.rows, quantity)
    # With measured acceptance, tokens per step are an input; only the blind figure is a prediction.
    lines += _of_quantity("tokens_per_step", report.blind, "tokens_per_step, blind")
    return "\n".join(lines)


def _of_quantity(quantity: str, rows: Iterable[Row], name: str) -> list[str]:
    lines = []
    chosen = [row for row in rows if row.quantity == quantity]
    for part in ("fit", "report"):
        errors = sorted(abs(row.error) for row in chosen if row.part == part)
        if errors:
            within = sum(error <= 0.2 for error in errors) / len(errors)
            lines.append(f"| {name} | {part} | {len(errors)} | {errors[len(errors) // 2]:.1%} | {within:.0%} |")
    return lines


def as_csv(report: Report, figures: Sequence[Figure], *, unlicensed: bool) -> str:
    """Return every row, and the figures that follow from a formula.

    Parameters
    ----------
    unlicensed
        Whether to show measured and simulated values of sources without a licence.
    """
    blind = {(row.group, row.label, row.quantity): row for row in report.blind}
    lines: list[Sequence[str]] = [_COLUMNS]
    for row in sorted(report.rows, key=_order):
        other = blind.get((row.group, row.label, row.quantity)) if row.given else None
        shown = unlicensed or row.group.source not in UNLICENSED
        values = [f"{value:.4g}" if shown else "" for value in (row.measured, row.simulated)]
        blindly = ("", "") if other is None else (f"{other.simulated:.4g}" if shown else "", f"{other.error:+.4f}")
        lines.append((row.part, *row.group, row.label, row.quantity, *values, f"{row.error:+.4f}", *blindly))
    for figure in figures:
        shown = unlicensed or figure.source not in UNLICENSED
        values = [f"{value:.4g}" if shown else "" for value in (figure.measured, figure.simulated)]
        error = f"{figure.simulated / figure.measured - 1:+.4f}"
        lines.append(("formula", "", figure.source, "", "", figure.what, figure.quantity, *values, error, "", ""))
    return _csv(lines)


def left_out_csv(left_out: Sequence[LeftOut]) -> str:
    """Return what is not reproduced, and why."""
    header = ("source", "what", "rows", "reason")
    return _csv([header, *((entry.source, entry.what, str(entry.rows), entry.reason) for entry in left_out)])


def _csv(lines: Iterable[Sequence[str]]) -> str:
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def _order(row: Row) -> tuple[object, ...]:
    return (row.group.setup, row.group.source, row.group.workload, len(row.group.load), row.group.load, row.label)
