"""What a replay comes to: its figures, and the table of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from rich import box
from rich.console import Console
from rich.table import Table

from lab.replay.simulate import Replayed, slo_kept

_AT = ("mean", "p50", "p90", "p99")
_TIMES = (("e2e_s", "e2e, s", 1.0), ("ttft_s", "ttft, s", 1.0), ("tpot_s", "tpot, ms", 1e3))


def figures_of(
    result: Replayed, backends: Sequence[str], slo: Mapping[str, float], best_s: float | None
) -> dict[str, Any]:
    """Return the figures of one policy; times in seconds.

    `goodput` is requests a second that kept all bounds of the SLO, and `slo_kept` their share; without one all do.

    Parameters
    ----------
    backends
        Names of those that `result.backend` numbers.
    best_s
        What the regret is relative to; None where that is not known.
    """
    good = slo_kept(result, slo)
    duration_s, mean_s = result.duration_s, mean_of(result.e2e_s)
    shares = np.bincount(result.backend, minlength=len(backends)) / max(1, len(result.backend))
    return {
        "requests": len(result.e2e_s),
        "errors": result.errors,
        "e2e_s": _summary(result.e2e_s),
        "ttft_s": _summary(result.ttft_s),
        "tpot_s": _summary(result.tpot_s[~np.isnan(result.tpot_s)]),
        "output_tokens_per_s": float(result.output_tokens.sum() / duration_s) if duration_s else 0.0,
        "shares": {name: float(share) for name, share in zip(backends, shares, strict=True)},
        "goodput": float(good.sum() / duration_s) if duration_s else 0.0,
        "slo_kept": float(good.mean()) if len(good) else None,
        "regret": mean_s / best_s - 1.0 if mean_s is not None and best_s is not None else None,
    }


def mean_of(values: npt.NDArray[np.float64]) -> float | None:
    """Return the mean; None of nothing."""
    return float(values.mean()) if len(values) else None


def _summary(values: npt.NDArray[np.float64]) -> dict[str, float | None]:
    if not len(values):
        return dict.fromkeys(_AT)
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return {"mean": float(values.mean()), "p50": float(p50), "p90": float(p90), "p99": float(p99)}


def figures_tables(
    figures: Mapping[str, Mapping[str, Any]], slo: Mapping[str, float], names_of: str
) -> tuple[Table, Table]:
    """Return the table of counts and shares, and that of times.

    Parameters
    ----------
    figures
        By name, what `figures_of` returns.
    slo
        Without bounds there is no column of goodput.
    names_of
        What the names are those of.
    """
    return _counts(figures, slo, names_of), _times(figures, names_of)


def _counts(figures: Mapping[str, Mapping[str, Any]], slo: Mapping[str, float], names_of: str) -> Table:
    with_regret = any(one["regret"] is not None for one in figures.values())
    headings = ["requests", "errors", "tokens/s", *(["SLO kept", "goodput/s"] if slo else [])]
    table = _table([names_of, *headings, *(["regret"] if with_regret else [])], left=1)
    table.add_column("share of each backend")
    for name, one in figures.items():
        row = [name, f"{one['requests']:,}", f"{one['errors']:,}", f"{one['output_tokens_per_s']:,.0f}"]
        row += [_shown(one["slo_kept"], ".1%"), f"{one['goodput']:.2f}"] if slo else []
        row += [_shown(one["regret"], "+.1%")] if with_regret else []
        row.append("  ".join(f"{backend} {share:.0%}" for backend, share in one["shares"].items()) or "not told")
        table.add_row(*row)
    return table


def _times(figures: Mapping[str, Mapping[str, Any]], names_of: str) -> Table:
    table = _table(["time", names_of, *_AT], left=2)
    for name, title, factor in _TIMES:
        for place, (policy, one) in enumerate(figures.items()):
            times = [_shown(None if value is None else factor * value, ".3f") for value in one[name].values()]
            table.add_row("" if place else title, policy, *times, end_section=place == len(figures) - 1)
    return table


def _table(headings: Sequence[str], left: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < left else "right", no_wrap=place != left - 1)
    return table


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def figures_console() -> Console:
    """Return where tables are printed: the terminal, or lines wide enough for one in a file."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)
