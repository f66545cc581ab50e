"""Figures of a replay, and their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from lab.report.terminal import text_table
from lab.simulation.simulate import Replayed, slo_kept
from lab.statistics import STATISTICS, TIMES, cell, summary


def figures_of(result: Replayed, backends: Sequence[str], slo: Mapping[str, float]) -> dict[str, Any]:
    """Return the figures of one policy; times in seconds.

    `goodput` is the rate of requests that kept all bounds of the SLO, `slo_kept` their share of all requests; without
    bounds, every served request keeps it.
    """
    good, duration_s = slo_kept(result, slo), result.duration_s
    sent = len(good) + result.errors
    shares = np.bincount(result.backend, minlength=len(backends)) / max(1, len(result.backend))
    return {
        "requests": len(result.e2e_s),
        "errors": result.errors,
        "e2e_s": summary(result.e2e_s),
        "ttft_s": summary(result.ttft_s),
        "tpot_s": summary(result.tpot_s),
        "output_tokens_per_s": float(result.output_tokens.sum() / duration_s) if duration_s else 0.0,
        "shares": {name: float(share) for name, share in zip(backends, shares, strict=True)},
        "goodput": float(good.sum() / duration_s) if duration_s else 0.0,
        "slo_kept": float(good.sum() / sent) if sent else None,
    }


def figures_tables(
    figures: Mapping[str, Mapping[str, Any]], slo: Mapping[str, float], names_of: str
) -> tuple[Table, Table]:
    """Return a table of counts and shares, and a table of times."""
    headings = ["requests", "errors", "tokens/s", *(["SLO kept", "goodput/s"] if slo else [])]
    counts = text_table([names_of, *headings], left=1)
    counts.add_column("share of each backend")
    for name, row in figures.items():
        cells = [name, f"{row['requests']:,}", f"{row['errors']:,}", f"{row['output_tokens_per_s']:,.0f}"]
        cells += [cell(row["slo_kept"], ".1%"), f"{row['goodput']:.2f}"] if slo else []
        cells.append("  ".join(f"{backend} {share:.0%}" for backend, share in row["shares"].items()) or "unknown")
        counts.add_row(*cells)
    all_times = text_table(["time", names_of, *STATISTICS], left=2)
    for name, title, factor in TIMES:
        for index, (policy, row) in enumerate(figures.items()):
            times = [cell(value, factor=factor) for value in row[name].values()]
            all_times.add_row("" if index else title, policy, *times, end_section=index == len(figures) - 1)
    return counts, all_times
