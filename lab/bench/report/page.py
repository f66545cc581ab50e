"""The report as one self-contained HTML page with SVG plots."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

from lab.bench.report.results import Distribution, Report, Run
from lab.bench.report.sweeps import sweep_sections
from lab.bench.report.table import cell_title, cells, interval, milliseconds, remarks
from lab.report.charts import Bar, Line, bar_chart, line_chart
from lab.report.colors import backend_colors
from lab.report.distributions import PERCENT, line_figure
from lab.report.page import figure, figures, folded, legend, listed, page, section, table
from lab.report.scale import Axis

_SHOWN_FROM, _SHOWN_TO = 2, 99  # percentiles; the outermost would stretch the axis for a few requests
_TIMES = (
    ("ttft", "Time to first token"),
    ("tpot", "Time per output token after the first (TPOT)"),
    ("itl", "Time between chunks, one per step (ITL)"),
    ("e2e", "End to end"),
)
_COURSES = (
    ("in_flight", "Requests in flight"),
    ("sent_per_s", "Requests sent per second"),
    ("output_tokens_per_s", "Output tokens per second, of answers that ended"),
)


def bench_page(report: Report) -> str:
    """Return the page as HTML."""
    colors = _colors(report.runs)
    answered = [run for run in report.runs if run.completed]
    several = len({run.model for run in report.runs}) > 1
    all_cells = cells(report.runs)
    body = [
        legend(
            ((_described(report.runs, name), color, None) for name, color in colors.items()),
            sticky=True,
        ),
        _losses(answered),
        *sweep_sections(answered, colors),
    ]
    for index, cell in enumerate(all_cells):
        runs = [run for run in report.runs if run.cell == cell]
        title = cell_title(runs[0], with_model=several)
        body.append(folded(title, _cell(runs, colors), is_open=index == 0 or len(all_cells) <= 2))
    body.append(section("Notes", listed(remarks(report))))
    return page(
        f"gateway bench, {report.created}",
        ", ".join(dict.fromkeys(run.model for run in report.runs)) or "nothing measured",
        [f"gateway bench {report.version}, {report.created}"],
        body,
        command=shlex.join(report.command),
        warning="Stopped early." if report.interrupted else "",
    )


def _described(runs: Sequence[Run], target: str) -> str:
    """Return a target with what its name does not say."""
    run = next(run for run in runs if run.target == target)
    words = [run.method if run.method not in {None, target} else "", "simulated" if run.simulated else ""]
    if run.k and f"k={run.k}" not in target:
        words.insert(1, f"k={run.k}")
    details = ", ".join(word for word in words if word)
    return f"{target} ({details})" if details else target


def _losses(runs: Sequence[Run]) -> str:
    """Return the runs that are slower than the baseline beyond the interval."""
    compared = [run for run in runs if run.speedup is not None]
    if not compared:
        return ""
    lost: list[tuple[float, str]] = []
    for run in compared:
        assert run.speedup is not None
        for name, ratio in (("output tokens/s", run.speedup.output_tokens_per_s), ("TPOT", run.speedup.tpot_p50)):
            if ratio is not None and ratio.high < 1:
                lost.append(
                    (
                        ratio.value,
                        f"{run.target} at {cell_title(run)}: {name} {interval(ratio)} of {run.speedup.baseline}",
                    )
                )
    lines = [words for _, words in sorted(lost)] or ["Nowhere beyond the interval."]
    return section("Where speculation loses", listed(lines))


def _cell(runs: Sequence[Run], colors: dict[str, str]) -> str:
    drawn = []
    compared = [run for run in runs if run.speedup is not None]
    if compared:
        name = compared[0].speedup.baseline if compared[0].speedup else ""
        speedups = [(run.target, colors[run.target], run.speedup) for run in compared if run.speedup]
        throughput = [Bar.of(target, color, one.output_tokens_per_s) for target, color, one in speedups]
        drawn.append(_bars(f"Output tokens/s over {name}", throughput))
        tpot = [Bar.of(target, color, one.tpot_p50) for target, color, one in speedups if one.tpot_p50]
        drawn.append(_bars(f"Median TPOT of {name} over its own", tpot))
    else:
        bars = [Bar(run.target, colors[run.target], run.output_tokens_per_s) for run in runs if run.completed]
        drawn.append(_bars("Output tokens/s", bars, reference=None))
    lines = legend((run.target, colors[run.target], _dash(run.target, colors)) for run in runs)
    times = figures(*_distributions(runs, colors), *_positions(runs, colors))
    return figures(*drawn) + lines + times + figures(*_courses(runs, colors)) + _tables(runs)


def _bars(title: str, bars: Sequence[Bar], reference: float | None = 1.0) -> str:
    return figure(title, bar_chart(title, bars, reference)) if bars else ""


def _distributions(runs: Sequence[Run], colors: dict[str, str]) -> Iterator[str]:
    for field, title in _TIMES:
        lines = []
        for run in runs:
            times: Distribution | None = getattr(run, field)
            if times is not None:
                points = [(max(times.quantiles[share], 1e-3), share) for share in range(_SHOWN_FROM, _SHOWN_TO + 1)]
                lines.append(Line(run.target, colors[run.target], points, _dash(run.target, colors)))
        if lines:
            axis = Axis("milliseconds, logarithmic", logarithmic=True)
            yield figure(title, line_chart(title, lines, axis, PERCENT, markers=False))


def _courses(runs: Sequence[Run], colors: dict[str, str]) -> Iterator[str]:
    for field, title in _COURSES:
        lines = []
        for run in runs:
            if (course := run.timeline) is not None:
                values: Sequence[float] = getattr(course, field)
                points = [((index + 0.5) * course.interval_s, float(value)) for index, value in enumerate(values)]
                lines.append(Line(run.target, colors[run.target], points, _dash(run.target, colors)))
        axis = Axis("seconds after the start", from_zero=True)
        yield line_figure(title, lines, axis, Axis("", from_zero=True), markers=False)


def _positions(runs: Sequence[Run], colors: dict[str, str]) -> Iterator[str]:
    lines = [
        Line(run.target, colors[run.target], list(enumerate(run.acceptance.by_position, 1)), _dash(run.target, colors))
        for run in runs
        if run.acceptance is not None and run.acceptance.by_position
    ]
    if lines:
        deepest = max(len(line.points) for line in lines)
        ticks = tuple(range(1, deepest + 1, max(1, deepest // 8)))
        axes = Axis("position of the draft", at=ticks), Axis("accepted, share of drafting steps", from_zero=True)
        yield line_figure("Acceptance by position", lines, *axes)


def _tables(runs: Sequence[Run]) -> str:
    headings = ["target", "requests", "failed", "req/s", "output tok/s", "total tok/s", "speedup tok/s", "speedup TPOT"]
    headings += ["acceptance rate", "acceptance length", "tokens per step"]
    speeds = table("Throughput; speedups with 95% intervals", headings, [[run.target, *_speeds(run)] for run in runs])
    times = [f"{name} {at}" for name in ("TTFT", "ITL", "TPOT", "E2E") for at in ("mean", "p50", "p95", "p99")]
    rows = [[run.target, *_times(run)] for run in runs]
    return f"{speeds}<p>Speedups with 95% intervals.</p>{table('Times, milliseconds', ['milliseconds', *times], rows)}"


def _speeds(run: Run) -> list[str]:
    cells = [str(run.completed), str(run.failed or ""), f"{run.requests_per_s:.2f}", f"{run.output_tokens_per_s:.1f}"]
    cells.append(f"{run.total_tokens_per_s:.1f}")
    speedup, acceptance = run.speedup, run.acceptance
    cells += [interval(speedup.output_tokens_per_s), interval(speedup.tpot_p50)] if speedup is not None else ["", ""]
    if acceptance is None:
        return [*cells, "", "", ""]
    rate = "" if acceptance.rate is None else f"{acceptance.rate:.3f}"
    return [*cells, rate, f"{acceptance.length:.2f}", f"{acceptance.tokens_per_step:.2f}"]


def _times(run: Run) -> list[str]:
    cells = []
    for times in (run.ttft, run.itl, run.tpot, run.e2e):
        if times is None:
            cells += [""] * 4
        else:
            cells += [milliseconds(value) for value in (times.mean, times.p50, times.p95, times.p99)]
    return cells


def _colors(runs: Sequence[Run]) -> dict[str, str]:
    """Return the color of each target: that of its method, if it is known."""
    return backend_colors({run.target: run.method for run in runs})


def _dash(target: str, colors: Mapping[str, str]) -> int:
    return list(colors).index(target)
