"""Printing a summary on the terminal."""

from __future__ import annotations

import sys
from datetime import UTC, datetime

from rich import box
from rich.console import Console
from rich.table import Table

from lab.trace.statistics import Summary

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
_EPOCH_FROM = 1e8  # seconds; smaller times do not count from 1970


def print_summary(summary: Summary) -> None:
    """Print a summary as tables."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    for line in _head(summary):
        console.print(line, markup=False, soft_wrap=True)
    if summary.measures:
        console.print()
        console.print(_measures(summary))
    for name, shares in summary.groups.items():
        console.print()
        table = _table([name, "requests", "share", "prompt tokens", "output tokens"])
        for group in shares:
            output = "" if group.output_tokens_mean is None else f"{group.output_tokens_mean:.0f}"
            share = f"{group.requests / summary.requests:.1%}"
            prompt = f"{group.prompt_tokens_mean:.0f}"
            table.add_row(group.value or "(none)", str(group.requests), share, prompt, output)
        if summary.distinct[name] > len(shares):
            table.add_row(f"({summary.distinct[name]} in all)", "", "", "", "")
        console.print(table)
    if summary.acceptance:
        console.print()
        table = _table(["acceptance", "requests", "tokens/step", "p50"])
        for steps in summary.acceptance:
            table.add_row(steps.method, str(steps.requests), f"{steps.mean:.2f}", f"{steps.p50:.2f}")
        console.print(table)


def _head(summary: Summary) -> list[str]:
    lines = [f"{path} ({kind})" for path, kind in list(summary.files.items())[:5]]
    if len(summary.files) > len(lines):
        lines.append(f"and {len(summary.files) - len(lines)} more")
    lines.append(
        f"{summary.requests} requests" + (f", {summary.broken_lines} broken lines" if summary.broken_lines else "")
    )
    if summary.first_at is not None and summary.duration_s is not None:
        begun = f"from {_moment(summary.first_at)}, " if summary.first_at >= _EPOCH_FROM else ""
        rate = "" if summary.rate_per_s is None else f", {summary.rate_per_s:.3g} requests/s"
        lines.append(f"{begun}{summary.duration_s:.1f} s{rate}")
    else:
        lines.append("no times")
    if summary.distinct["session"]:
        lines.append(f"{summary.distinct['session']} sessions")
    if summary.prefix_reuse is not None:
        lines.append(f"{summary.prefix_blocks} prefix blocks, about {summary.prefix_reuse:.0%} of them seen before")
    lines.append(f"{summary.texts} with text" if summary.texts else "no texts")
    if not summary.exact:
        lines.append("quantiles are estimates")
    return lines


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(sep=" ", timespec="seconds")


def _measures(summary: Summary) -> Table:
    table = _table(["", "requests", "mean", "p50", "p90", "p99", "max"])
    for name, spread in summary.measures.items():
        values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
        table.add_row(_NAMES.get(name, name), str(spread.requests), *map(_figure, values))
    return table


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def _table(headings: list[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    return table
