"""Printing the runs of a benchmark on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table

from lab.bench.run import Condition, Run, Speedup
from lab.replay.comparison import in_pairs, verdict
from lab.replay.figures import figures_tables
from lab.report.terminal import report, text_table
from lab.statistics import Interval

_SHOWN_POSITIONS = 8


def show_runs(runs: Sequence[Run], not_measured: Mapping[str, str], *, stopped: bool) -> None:
    """Show who won, tables for each condition, and remarks."""
    parts: list[str | Table] = [*(verdicts(runs, stopped=stopped) if runs else ["Nothing was measured."]), ""]
    for condition in dict.fromkeys(run.condition for run in runs):
        alike = [run for run in runs if run.condition == condition]
        parts += [title_of(condition), *figures_tables({run.target.name: run.figures for run in alike}, {}, "target")]
        table = text_table(["target", "x e2e (95%)", "x tpot (95%)", "accepted", "tokens/step"], left=1)
        table.add_column("accepted at each position")
        for run in alike:
            table.add_row(run.target.name, *_gains(run.speedup), *_acceptance(run))
        parts.append(table)
    report("gateway bench", [*parts, *remarks(runs, not_measured)])


def verdicts(runs: Sequence[Run], *, stopped: bool) -> Iterator[str]:
    """Yield who won under each condition."""
    if stopped:
        yield "Stopped early: nobody won."
        return
    for condition in dict.fromkeys(run.condition for run in runs):
        played = {run.target.name: run.result for run in runs if run.condition == condition}
        yield f"{title_of(condition)}: {verdict(played, in_pairs(played))}"


def title_of(condition: Condition) -> str:
    """Return a title.

    Examples
    --------
    >>> title_of(Condition(0.7, 4.0)), title_of(Condition(None, None)), title_of(Condition(None, None, 8))
    ('4 requests/s, temperature 0.7', 'the rate of the trace', '8 requests at once')
    """
    temperature, rate, concurrency = condition
    words = "the rate of the trace" if rate is None else f"{rate:g} requests/s"
    words = words if concurrency is None else f"{concurrency} requests at once"
    return words if temperature is None else f"{words}, temperature {temperature:g}"


def remarks(runs: Sequence[Run], not_measured: Mapping[str, str]) -> Iterator[str]:
    """Yield remarks on the figures: what is simulated, failures, notes, targets that were not measured."""
    simulated = dict.fromkeys(run.target.name for run in runs if run.target.simulated)
    if simulated:
        yield f"Simulated: {', '.join(simulated)}. Their step times come from tables, not from hardware."
    for run in runs:
        for line in run.outcome.remarks():
            yield f"{run.target.name}, {title_of(run.condition)}: {line}"
    for target, why in not_measured.items():
        yield f"{target}: not measured: {why}"


def ratio_text(ratio: Interval | None) -> str:
    """Return a ratio with its interval, if it has one.

    Examples
    --------
    >>> ratio_text(Interval(1.5, 1.4, 1.6)), ratio_text(Interval(1.5))
    ('1.50 (1.40-1.60)', '1.50')
    """
    if ratio is None:
        return ""
    return f"{ratio.value:.2f}" + (f" ({ratio.low:.2f}-{ratio.high:.2f})" if ratio.is_known else "")


def _gains(speedup: Speedup | None) -> tuple[str, str]:
    return ("", "") if speedup is None else (ratio_text(speedup.e2e), ratio_text(speedup.tpot))


def _acceptance(run: Run) -> tuple[str, str, str]:
    if (one := run.acceptance) is None:
        return "", "", ""
    positions = "  ".join(f"{share:.2f}" for share in one.by_position[:_SHOWN_POSITIONS])
    return "" if one.rate is None else f"{one.rate:.3f}", f"{one.tokens_per_step:.2f}", positions
