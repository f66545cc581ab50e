"""Prints the summary of a trace on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from rich.table import Table

from lab.report.terminal import report, text_table

_NAMES = {
    "prompt_tokens": "prompt tokens",
    "output_tokens": "output tokens",
    "ttft_s": "TTFT, s",
    "tpot_s": "TPOT, s",
    "e2e_s": "E2E, s",
    "queue_s": "queue, s",
    "tokens_per_step": "tokens/step",
    "share_cached": "prompt cached",
}
_EPOCH_FROM = 1e8  # seconds; earlier times do not count from 1970
_MOST_FILES = 5


def print_summary(summary: Mapping[str, Any]) -> None:
    """Print what `lab.trace.summary.summarize` returns."""
    report("gateway trace show", [*_head(summary), "", *_tables(summary)])


def _head(summary: Mapping[str, Any]) -> Iterator[str]:
    files = [f"{path} ({kind})" for path, kind in summary["files"].items()]
    yield from files[:_MOST_FILES]
    if len(files) > _MOST_FILES:
        yield f"and {len(files) - _MOST_FILES} more"
    broken = f", {summary['broken_lines']} broken lines" if summary["broken_lines"] else ""
    yield f"{summary['requests']} requests{broken}"
    if summary["first_at"] is None:
        yield "no times"
    else:
        begun = ""
        if summary["first_at"] >= _EPOCH_FROM:
            moment = datetime.fromtimestamp(summary["first_at"], UTC)
            begun = f"from {moment.isoformat(sep=' ', timespec='seconds')}, "
        rate = "" if summary["rate_per_s"] is None else f", {summary['rate_per_s']:.3g} requests/s"
        without = summary["requests"] - summary["timed"]
        of_rest = f", without {without} requests that have no time" if without else ""
        yield f"{begun}{summary['duration_s']:.1f} s{rate}{of_rest}"
    if summary["distinct"]["session"]:
        yield f"{summary['distinct']['session']} sessions"
    if summary["prefix_reuse"] is not None:
        yield f"{summary['prefix_blocks']} prefix blocks, about {summary['prefix_reuse']:.0%} of them seen before"
    yield f"{summary['texts']} with text" if summary["texts"] else "no texts"
    if not summary["exact"]:
        yield "quantiles are estimates"


def _tables(summary: Mapping[str, Any]) -> Iterator[Table]:
    if summary["measures"]:
        table = text_table(["", "requests", "mean", "p50", "p90", "p99", "max"], left=1)
        for name, measure in summary["measures"].items():
            requests, *figures = measure.values()
            table.add_row(_NAMES.get(name, name), str(requests), *map(_figure, figures))
        yield table
    for name, groups in summary["groups"].items():
        table = text_table([name, "requests", "share", "prompt tokens", "output tokens"], left=1)
        for group in groups:
            means = ["" if group[key] is None else f"{group[key]:.0f}" for key in list(group)[2:]]
            share = f"{group['requests'] / summary['requests']:.1%}"
            table.add_row(group["value"] or "(none)", str(group["requests"]), share, *means)
        if summary["distinct"][name] > len(groups):
            table.add_row(f"({summary['distinct'][name]} in all)")
        yield table
    if summary["acceptance"]:
        table = text_table(["acceptance", "requests", "tokens/step", "p50"], left=1)
        for steps in summary["acceptance"]:
            table.add_row(steps["method"], str(steps["requests"]), f"{steps['mean']:.2f}", f"{steps['p50']:.2f}")
        yield table


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
