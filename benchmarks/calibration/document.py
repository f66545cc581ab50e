"""The calibration report as tables, and as CSV."""

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

_COLUMNS = (
    *("part", "setup", "source", "workload", "load", "method", "quantity"),
    *("measured", "simulated", "error", "blind", "blind_error"),
)


def terminal(report: Report) -> str:
    """Return the summary tables."""
    by_source, by_setup = (_by(report, key) for key in (lambda row: row.group.source, lambda row: row.group.setup))
    return "\n\n".join((_summaries(report), _held_out(report), by_source, by_setup, _other_quantities(report)))


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
