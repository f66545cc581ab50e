"""The report as one self-contained HTML page with SVG plots."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence

from lab.bench.report.results import Distribution, Interval, Report, Run
from lab.bench.report.table import cell_title, cells, interval, milliseconds, remarks
from lab.report.charts import Bar, Line, bar_chart, line_chart
from lab.report.colors import backend_colors
from lab.report.distributions import PERCENT
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
Value = Callable[[Run], float | None]


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
        *_sweeps(answered, colors),
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
                        ratio.ratio,
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
        throughput = [_bar(run, colors, run.speedup.output_tokens_per_s) for run in compared if run.speedup]
        drawn.append(_bars(f"Output tokens/s over {name}", throughput))
        tpot = [_bar(run, colors, run.speedup.tpot_p50) for run in compared if run.speedup and run.speedup.tpot_p50]
        drawn.append(_bars(f"Median TPOT of {name} over its own", tpot))
    else:
        bars = [Bar(run.target, colors[run.target], run.output_tokens_per_s) for run in runs if run.completed]
        drawn.append(_bars("Output tokens/s", bars, reference=None))
    lines = legend((run.target, colors[run.target], _dash(run.target, colors)) for run in runs)
    times = figures(*_distributions(runs, colors), *_positions(runs, colors))
    return figures(*drawn) + lines + times + figures(*_courses(runs, colors)) + _tables(runs)


def _bars(title: str, bars: Sequence[Bar], reference: float | None = 1.0) -> str:
    return figure(title, bar_chart(title, bars, reference)) if bars else ""


def _bar(run: Run, colors: dict[str, str], ratio: Interval | None) -> Bar:
    assert ratio is not None
    return Bar(run.target, colors[run.target], ratio.ratio, ratio.low, ratio.high)


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
        if lines:
            axis = Axis("seconds after the start", from_zero=True)
            yield figure(title, line_chart(title, lines, axis, Axis("", from_zero=True), markers=False))


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
        title = "Acceptance by position"
        yield figure(title, line_chart(title, lines, *axes))


def _sweeps(runs: Sequence[Run], colors: dict[str, str]) -> Iterator[str]:
    """Yield a section for each parameter that was varied, with a line for each target."""
    speed: tuple[str, Value] = ("Output tokens/s", lambda run: run.output_tokens_per_s)
    tpot: tuple[str, Value] = ("Median TPOT, ms", lambda run: run.tpot.p50 if run.tpot else None)
    ttft: tuple[str, Value] = ("TTFT, 95th percentile, ms", lambda run: run.ttft.p95 if run.ttft else None)
    gain: tuple[str, Value] = (
        "Median TPOT, speedup over the baseline",
        lambda run: run.speedup.tpot_p50.ratio if run.speedup and run.speedup.tpot_p50 else None,
    )
    rate: tuple[str, Value] = ("Acceptance rate", lambda run: run.acceptance.rate if run.acceptance else None)
    length: tuple[str, Value] = (
        "Output tokens per step",
        lambda run: run.acceptance.tokens_per_step if run.acceptance else None,
    )
    label = "Concurrent requests" if runs and runs[0].load.kind == "concurrency" else "Offered requests/s"
    yield from _sweep(runs, colors, ("Load", label), lambda run: run.load.value, [speed, tpot, gain, ttft])
    yield from _sweep(
        runs, colors, ("Temperature", "Temperature"), lambda run: run.temperature, [rate, length, gain, tpot]
    )
    if any(f"k={run.k}" in run.target for run in runs):
        drafting = [run for run in runs if run.k]
        yield from _sweep(drafting, colors, ("Drafted tokens", "k"), lambda run: run.k, [gain, speed, length, rate])


def _sweep(
    runs: Sequence[Run],
    colors: dict[str, str],
    names: tuple[str, str],
    varied: Value,
    measures: Sequence[tuple[str, Value]],
) -> Iterator[str]:
    title, label = names
    values = sorted({value for run in runs if (value := varied(run)) is not None})
    if len(values) < 2:
        return
    logarithmic = title == "Load" and values[-1] / values[0] >= 8
    by_line: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        by_line.setdefault(_line(run, runs, title), []).append(run)
    conditions = list(dict.fromkeys(condition for _, condition in by_line))
    drawn = []
    for measure, of in measures:
        lines = []
        for (name, condition), own in by_line.items():
            points = [(x, y) for run in own if (x := varied(run)) is not None and (y := of(run)) is not None]
            if points:
                legend = ", ".join(word for word in (name, condition) if word)
                lines.append(Line(legend, colors[own[0].target], sorted(points), conditions.index(condition)))
        if lines:
            reference = 1.0 if "speedup" in measure else None
            ticks = values if len(values) <= 8 else None
            axes = Axis(label, logarithmic=logarithmic, at=ticks), Axis("", from_zero=True)
            drawn.append(figure(measure, line_chart(measure, lines, *axes, reference=reference)))
    if drawn:
        yield section(title, _key(by_line, colors, conditions), figures(*drawn))


def _line(run: Run, runs: Sequence[Run], varied: str) -> tuple[str, str]:
    """Return target and condition of the line that a run belongs to; the condition names what else varies."""
    name = run.target.removesuffix(f" k={run.k}") if varied == "Drafted tokens" else run.target
    words = []
    if varied != "Load" and len({other.load for other in runs}) > 1:
        words.append(str(run.load))
    if varied != "Temperature" and len({other.temperature for other in runs}) > 1 and run.temperature is not None:
        words.append(f"T={run.temperature:g}")
    return name, ", ".join(words)


def _key(by_line: Mapping[tuple[str, str], Sequence[Run]], colors: dict[str, str], conditions: Sequence[str]) -> str:
    """Return a key for colors and dashes of a section that are not in the legend of the page."""
    entries: list[tuple[str, str, int | None]] = []
    for name in dict.fromkeys(name for name, _ in by_line):
        if name not in colors:
            color = next(colors[own[0].target] for (other, _), own in by_line.items() if other == name)
            entries.append((name, color, None))
    if len(conditions) > 1:
        entries += [(condition, "var(--ink)", dash) for dash, condition in enumerate(conditions)]
    return legend(entries) if entries else ""


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
