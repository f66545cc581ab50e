"""Printing the figures on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lab.bench.report.results import Acceptance, Distribution, Report, Run
from lab.statistics import Interval

_STATISTICS = ("mean", "p50", "p95", "p99")
_SOURCES = {
    "answers": "the engine's report in each answer (metrics.speculative_decoding)",
    "counters": "the difference of the engine's /metrics counters",
    "chunks": "output tokens per chunk, since neither answers nor /metrics report it",
}


def print_report(report: Report, console: Console) -> None:
    """Print the tables, followed by remarks."""
    several = len({run.model for run in report.runs}) > 1
    for cell in cells(report.runs):
        runs = [run for run in report.runs if run.cell == cell]
        console.print()
        console.print(Text(cell_title(runs[0], with_model=several), style="bold"))
        console.print(_speeds(runs))
        console.print(_times(runs))
        if any(run.acceptance is not None for run in runs):
            console.print(_acceptances(runs))
    for line in remarks(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def cells(runs: Sequence[Run]) -> list[tuple[str, float | None, str, float]]:
    """Return the distinct cells of runs, in order of appearance."""
    return list(dict.fromkeys(run.cell for run in runs))


def cell_title(run: Run, *, with_model: bool = False) -> str:
    """Return a title with load and temperature of a cell."""
    temperature = "temperature left to the engine" if run.temperature is None else f"temperature {run.temperature:g}"
    return (f"{run.model}, " if with_model else "") + f"{run.load}, {temperature}"


def remarks(report: Report) -> list[str]:
    """Return remarks on the figures: failures, notes, sources, targets not measured."""
    lines = []
    simulated = [run.target for run in report.runs if run.simulated]
    if simulated:
        lines.append(
            "Simulated: "
            + ", ".join(dict.fromkeys(simulated))
            + ". Their step times come from tables, not from hardware."
        )
    sources = dict.fromkeys(run.acceptance.source for run in report.runs if run.acceptance is not None)
    lines += [f"Acceptance from {_SOURCES[source]}." for source in sources]
    if any(run.completed for run in report.runs):
        lines.append(_generator(report.runs))
    for run in report.runs:
        name = f"{run.target}, {run.load}" + ("" if run.temperature is None else f", T={run.temperature:g}")
        lines += [
            f"{name}: {failure.count} failed, {failure.kind}: {failure.example}".rstrip(": ")
            for failure in run.failures
        ]
        lines += [f"{name}: {note}" for note in run.notes]
        if run.interrupted:
            lines.append(f"{name}: stopped; unfinished requests are not included.")
    lines += [f"{target}: not measured: {why}" for target, why in report.not_measured.items()]
    return lines


def _generator(runs: Sequence[Run]) -> str:
    share = max(run.generator.cpu_share for run in runs)
    late = max((run.generator.late_p99_ms for run in runs if run.generator.late_p99_ms is not None), default=None)
    stall = max((run.generator.stall_p99_ms or 0.0 for run in runs), default=0.0)
    sent = "" if late is None else f"requests sent at most {late:.1f} ms late, "
    return f"Load generator: {share:.0%} of a core at most, {sent}chunks recorded at most {stall:.1f} ms late (p99)."


def _speeds(runs: Sequence[Run]) -> Table:
    has_speedup = any(run.speedup is not None for run in runs)
    columns = ["target", "method", "k", "requests", "failed", "req/s", "output tok/s", "total tok/s"]
    table = _table([*columns, *(("x tok/s (95 %)", "x TPOT (95 %)") if has_speedup else ())], left=2)
    for run in runs:
        counts = [str(run.completed), str(run.failed) if run.failed else ""]
        rates = [f"{run.requests_per_s:.2f}", f"{run.output_tokens_per_s:.1f}", f"{run.total_tokens_per_s:.1f}"]
        cells = [run.target, run.method or "", str(run.k) if run.k else "", *counts, *rates]
        if has_speedup and run.speedup is not None:
            cells += [interval(run.speedup.output_tokens_per_s), interval(run.speedup.tpot_p50)]
        elif has_speedup:
            cells += ["1", "1"] if run.method == "baseline" else ["", ""]
        table.add_row(*cells)
    return table


def _times(runs: Sequence[Run]) -> Table:
    table = _table(["milliseconds", "target", *_STATISTICS], left=2)
    for name in ("TTFT", "ITL", "TPOT", "E2E"):
        for index, run in enumerate(runs):
            figures: Distribution | None = getattr(run, name.lower())
            times = ["" if figures is None else milliseconds(getattr(figures, which)) for which in _STATISTICS]
            table.add_row("" if index else name, run.target, *times, end_section=index == len(runs) - 1)
    return table


def _acceptances(runs: Sequence[Run]) -> Table:
    deepest = max(len(run.acceptance.by_position) for run in runs if run.acceptance is not None)
    positions = [f"pos {position}" for position in range(1, min(deepest, 8) + 1)]
    table = _table(["acceptance", "rate", "length", "tokens/step", *positions], left=1)
    for run in runs:
        if run.acceptance is not None:
            table.add_row(run.target, *_acceptance(run.acceptance, len(positions)))
    return table


def _acceptance(figures: Acceptance, positions: int) -> list[str]:
    rate = "" if figures.rate is None else f"{figures.rate:.3f}"
    by_position = [f"{share:.3f}" for share in figures.by_position[:positions]]
    return [rate, f"{figures.length:.2f}", f"{figures.tokens_per_step:.2f}", *by_position]


def _table(headings: Sequence[str], left: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < left else "right", no_wrap=index == 0)
    return table


def milliseconds(value: float) -> str:
    """Return a time with three significant digits or more.

    Examples
    --------
    >>> milliseconds(3.14159), milliseconds(1234.5)
    ('3.14', '1234')
    """
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def interval(ratio: Interval | None) -> str:
    """Return a ratio with its interval, if it has one.

    Examples
    --------
    >>> interval(Interval(1.5, 1.4, 1.6)), interval(Interval(1.5))
    ('1.50 (1.40-1.60)', '1.50')
    """
    if ratio is None:
        return ""
    return f"{ratio.value:.2f}" + (f" ({ratio.low:.2f}-{ratio.high:.2f})" if ratio.is_known else "")
