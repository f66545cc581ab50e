"""The report as one self-contained HTML page with SVG plots."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from importlib import resources

from lab.bench.report.results import Distribution, Interval, Report, Run
from lab.bench.report.table import cell_title, cells, interval, milliseconds, remarks
from lab.report.charts import Axis, Bar, Line, bar_chart, dash_sample, line_chart

# Distinguishable with most kinds of color vision: Okabe and Ito's palette, darkened for a white background.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#b3589a", "#c28f00", "#3f9bd1", "#7a5230", "#6a51a3")
_SHOWN_FROM, _SHOWN_TO = 2, 99  # percentiles; the outermost would stretch the axis for a few requests
_BASELINE_COLOR = "#7d858f"
_TIMES = (
    ("ttft", "Time to first token"),
    ("tpot", "Time per output token after the first (TPOT)"),
    ("itl", "Time between chunks, one per step (ITL)"),
    ("e2e", "End to end"),
)
Value = Callable[[Run], float | None]


def page(report: Report) -> str:
    """Return the page as HTML."""
    colors = _colors(report.runs)
    answered = [run for run in report.runs if run.completed]
    several = len({run.model for run in report.runs}) > 1
    body = [_head(report), _legend(report.runs, colors), *_sweeps(answered, colors)]
    all_cells = cells(report.runs)
    for index, cell in enumerate(all_cells):
        runs = [run for run in report.runs if run.cell == cell]
        title = escape(cell_title(runs[0], with_model=several))
        is_open = " open" if index == 0 or len(all_cells) <= 2 else ""
        body.append(f"<details{is_open}><summary><h2>{title}</h2></summary>{_cell(runs, colors)}</details>")
    notes = "".join(f"<li>{escape(line)}</li>" for line in remarks(report))
    if notes:
        body.append(f"<section><h2>Notes</h2><ul>{notes}</ul></section>")
    style = (resources.files("lab.report") / "page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>gateway bench, {escape(report.created)}</title><style>{style}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _head(report: Report) -> str:
    command = escape(shlex.join(report.command))
    models = ", ".join(dict.fromkeys(run.model for run in report.runs)) or "nothing measured"
    stopped = '<p class="warning">Stopped early.</p>' if report.interrupted else ""
    return (
        f"<header><h1>{escape(models)}</h1><p>gateway bench {escape(report.version)}, {escape(report.created)}</p>"
        f"<pre>{command}</pre>{stopped}</header>"
    )


def _legend(runs: Sequence[Run], colors: dict[str, str]) -> str:
    entries = []
    for target, color in colors.items():
        run = next(run for run in runs if run.target == target)
        words = [run.method if run.method not in {None, target} else "", "simulated" if run.simulated else ""]
        if run.k and f"k={run.k}" not in target:
            words.insert(1, f"k={run.k}")
        details = ", ".join(word for word in words if word)
        entries.append(
            f'<li><i style="background:{color}"></i>{escape(target)}'
            + (f" <small>{escape(details)}</small>" if details else "")
            + "</li>"
        )
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _cell(runs: Sequence[Run], colors: dict[str, str]) -> str:
    figures = []
    compared = [run for run in runs if run.speedup is not None]
    if compared:
        name = compared[0].speedup.baseline if compared[0].speedup else ""
        throughput = [_bar(run, colors, run.speedup.output_tokens_per_s) for run in compared if run.speedup]
        figures.append(_figure(f"Output tokens/s over {name}", bar_chart(throughput)))
        tpot = [_bar(run, colors, run.speedup.tpot_p50) for run in compared if run.speedup and run.speedup.tpot_p50]
        if tpot:
            figures.append(_figure(f"Median TPOT of {name} over its own", bar_chart(tpot)))
    else:
        bars = [Bar(run.target, colors[run.target], run.output_tokens_per_s) for run in runs if run.completed]
        figures += [_figure("Output tokens/s", bar_chart(bars, reference=None))] if bars else []
    figures += _distributions(runs, colors)
    figures += _positions(runs, colors)
    return f'<div class="figures">{"".join(figures)}</div>{_tables(runs)}'


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
                lines.append(Line(run.target, colors[run.target], points))
        if lines:
            chart = line_chart(
                lines,
                Axis("milliseconds, logarithmic", logarithmic=True),
                Axis("% at or below", at=(0, 25, 50, 75, 100), span=(0, 100)),
                markers=False,
            )
            yield _figure(title, chart)


def _positions(runs: Sequence[Run], colors: dict[str, str]) -> Iterator[str]:
    lines = [
        Line(run.target, colors[run.target], list(enumerate(run.acceptance.by_position, 1)))
        for run in runs
        if run.acceptance is not None and run.acceptance.by_position
    ]
    if lines:
        deepest = max(len(line.points) for line in lines)
        ticks = tuple(range(1, deepest + 1, max(1, deepest // 8)))
        axes = Axis("position of the draft", at=ticks), Axis("accepted, share of drafting steps", from_zero=True)
        yield _figure("Acceptance by position", line_chart(lines, *axes))


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
    figures = []
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
            axes = Axis(label, logarithmic=logarithmic, at=ticks), Axis(measure, from_zero=True)
            figures.append(_figure(measure, line_chart(lines, *axes, reference=reference)))
    if figures:
        key = _key(by_line, colors, conditions)
        yield f'<section><h2>{escape(title)}</h2>{key}<div class="figures">{"".join(figures)}</div></section>'


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
    entries = []
    for name in dict.fromkeys(name for name, _ in by_line):
        if name not in colors:
            color = next(colors[own[0].target] for (other, _), own in by_line.items() if other == name)
            entries.append(f'<li><i style="background:{color}"></i>{escape(name)}</li>')
    if len(conditions) > 1:
        entries += [f"<li>{dash_sample(dash)}{escape(condition)}</li>" for dash, condition in enumerate(conditions)]
    return f'<ul class="key">{"".join(entries)}</ul>' if entries else ""


def _tables(runs: Sequence[Run]) -> str:
    headings = ["", "requests", "failed", "req/s", "output tok/s", "total tok/s", "speedup tok/s", "speedup TPOT"]
    speeds = _table([*headings, "acceptance rate", "acceptance length", "tokens per step"], runs, _speeds)
    headings = [f"{name} {at}" for name in ("TTFT", "ITL", "TPOT", "E2E") for at in ("mean", "p50", "p95", "p99")]
    times = _table(["", *headings], runs, _times)
    return f"{speeds}<p>Speedups with 95 % intervals.</p>{times}<p>Times in milliseconds.</p>"


def _table(headings: Sequence[str], runs: Sequence[Run], row: Callable[[Run], Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    rows = ""
    for run in runs:
        rows += (
            f"<tr><th>{escape(run.target)}</th>" + "".join(f"<td>{escape(cell)}</td>" for cell in row(run)) + "</tr>"
        )
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


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


def _figure(title: str, chart: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{chart}</figure>"


def _colors(runs: Sequence[Run]) -> dict[str, str]:
    """Assign every target its own color; baselines are gray."""
    colors: dict[str, str] = {}
    for run in runs:
        if run.target not in colors:
            used = len([color for color in colors.values() if color != _BASELINE_COLOR])
            colors[run.target] = _BASELINE_COLOR if run.method == "baseline" else _COLORS[used % len(_COLORS)]
    return colors
