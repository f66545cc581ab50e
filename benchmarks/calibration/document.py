"""The report as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from math import isnan

from benchmarks.calibration.arithmetic import Row, Summary, summarize
from benchmarks.calibration.cases import Figure, LeftOut
from benchmarks.calibration.run import Report

AIMS = (0.08, 0.9, 0.9)

UNLICENSED = frozenset({"vllm012", "apertus"})
"""Sources whose tables carry no licence: of their rows the written page has the errors alone."""

_INTRODUCTION = """\
# The simulator against measurements

Every published or recorded figure that can be set up is set up in virtual time and compared. Made by

    python -m benchmarks.calibration FACTS DATA --write docs

where FACTS and DATA are the directories of the figures, which are not part of the project. {figures} `--rows FILE`
writes every row with what was measured; here the rows of sources without a licence (Apertus, the vLLM 0.12 metrics)
show their errors alone.

**Two parts.** The groups of a setup (one calibration), ordered by source, workload and load (those that do not state it
last), go alternately to the part that parameters may be fitted on (`fit`) and to the part that is only reported
(`report`). `--fit NAME` prints what the
fitting part says of a calibration's step times. A group's runs differ in the method alone.

**Two ways.** Where a run's own acceptance was published it is what the simulated run accepts, so that the step times
are judged (`as measured`). Blind, acceptance comes from the calibration, or from running the proposer on texts at hand.
The tables show the first; where nothing was published both are the same.

**Speedup** is over the baseline of the same group: of tokens/s, of a request's tokens/s while it decodes (vLLM 0.12
metrics) or of the median time between chunks (serving at 2 requests/s, where speculating makes every chunk come later).
The winner is right if the run simulated to be fastest is the fastest of its group as measured (runs of one method with
other k and the baseline compete), nearly right if it is within 5% of it: so good are ratios of different sweeps, says
the only source that repeated runs (Apertus).
"""

_COPIED = """\
Memory and the fall with temperature are what the calibrations were made from: their rows say that nothing was \
mistyped. The costs on Qwen3-1.7B were not used; they are Llama-3.1-8B's by parameters and KV bytes.

"""


def document(report: Report, figures: Sequence[Figure], left_out: Sequence[LeftOut], closing: str, plot: str) -> str:
    """Return the whole page.

    Parameters
    ----------
    closing
        What is to be said of the results, written by hand.
    plot
        Name of the plot beside the page.
    """
    speedups = [row for row in report.rows if row.quantity == "speedup"]
    counted = (
        f"{len(report.rows)} figures of {len({row.group for row in report.rows})} groups, {len(speedups)} of them "
        f"speedups, and {len(figures)} that need no run."
    )
    sections = [
        _INTRODUCTION.format(figures=counted),
        "## Speedup over the baseline\n\n" + _summaries(report),
        f"![Simulated against measured speedup]({plot})",
        closing,
        "## By source\n\n" + _by(report, lambda row: row.group.source),
        "## By setup\n\n" + _by(report, lambda row: row.group.setup),
        "## Other quantities\n\n" + _other_quantities(report),
        "## Figures that need no run\n\n" + _COPIED + _figures(figures),
        "## Left out\n\n" + _left_out(left_out),
        "## Every row\n\n" + _every_row(report),
    ]
    return "\n\n".join(section.strip() for section in sections) + "\n"


def terminal(report: Report) -> str:
    """Return the summaries alone."""
    by_source, by_setup = (_by(report, key) for key in (lambda row: row.group.source, lambda row: row.group.setup))
    return "\n\n".join((_summaries(report), by_source, by_setup))


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
    # Given acceptance comes out again by itself; blind it is a figure of its own.
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


def _figures(figures: Sequence[Figure]) -> str:
    lines = ["| source | what | quantity | measured | simulated | error |", "|---|---|---|---|---|---|"]
    for figure in figures:
        error = figure.simulated / figure.measured - 1
        lines.append(
            f"| {figure.source} | {figure.what} | {figure.quantity} | {figure.measured:.4g} | {figure.simulated:.4g} "
            f"| {error:+.1%} |"
        )
    return "\n".join(lines)


def _left_out(left_out: Sequence[LeftOut]) -> str:
    lines = ["| table | what | rows | why |", "|---|---|---|---|"]
    lines += [f"| {entry.source} | {entry.what} | {entry.rows} | {entry.reason} |" for entry in left_out]
    return "\n".join(lines)


def _every_row(report: Report) -> str:
    sections = []
    blind = {(row.group, row.label, row.quantity): row for row in report.blind}
    for setup, rows in groupby(sorted(report.rows, key=_order), key=lambda row: row.group.setup):
        lines = [
            f"### {setup}\n",
            "| part | source | workload | load | method | quantity | measured | simulated | error | blind: error |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for row in rows:
            other = blind.get((row.group, row.label, row.quantity))
            blindly = f"{other.error:+.0%}" if other is not None and row.given else ""
            _, source, workload, load = row.group
            shown = " | " if source in UNLICENSED else f"{row.measured:.4g} | {row.simulated:.4g}"
            lines.append(
                f"| {row.part} | {source} | {workload} | {load} | {row.label} | {row.quantity} | {shown} "
                f"| {row.error:+.0%} | {blindly} |"
            )
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def as_csv(report: Report) -> str:
    """Return every row with all its figures."""
    blind = {(row.group, row.label, row.quantity): row for row in report.blind}
    lines = ["part,setup,source,workload,load,method,quantity,measured,simulated,error,blind,blind_error"]
    for row in sorted(report.rows, key=_order):
        other = blind.get((row.group, row.label, row.quantity))
        blindly = f"{other.simulated:.5g},{other.error:.4f}" if other is not None else ","
        what = ",".join(f'"{name}"' for name in (*row.group, row.label))
        figures = f"{row.measured:.5g},{row.simulated:.5g},{row.error:.4f}"
        lines.append(f"{row.part},{what},{row.quantity},{figures},{blindly}")
    return "\n".join(lines) + "\n"


def _order(row: Row) -> tuple[object, ...]:
    return (row.group.setup, row.group.source, row.group.workload, len(row.group.load), row.group.load, row.label)
