"""The part of the page that shows what was varied: load, temperature, drafted tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from lab.bench.report.results import Run
from lab.report.charts import Line
from lab.report.distributions import line_figure
from lab.report.page import figures, legend, section
from lab.report.scale import Axis

Value = Callable[[Run], float | None]


def sweep_sections(runs: Sequence[Run], colors: Mapping[str, str]) -> Iterator[str]:
    """Yield a section for each parameter that was varied, with a line for each target."""
    speed: tuple[str, Value] = ("Output tokens/s", lambda run: run.output_tokens_per_s)
    tpot: tuple[str, Value] = ("Median TPOT, ms", lambda run: run.tpot.p50 if run.tpot else None)
    ttft: tuple[str, Value] = ("TTFT, 95th percentile, ms", lambda run: run.ttft.p95 if run.ttft else None)
    gain: tuple[str, Value] = (
        "Median TPOT, speedup over the baseline",
        lambda run: run.speedup.tpot_p50.value if run.speedup and run.speedup.tpot_p50 else None,
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
    colors: Mapping[str, str],
    titles: tuple[str, str],
    varied: Value,
    measures: Sequence[tuple[str, Value]],
) -> Iterator[str]:
    title, label = titles
    values = sorted({value for run in runs if (value := varied(run)) is not None})
    if len(values) < 2:
        return
    logarithmic = title == "Load" and values[-1] / values[0] >= 8
    by_line: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        by_line.setdefault(_line(run, runs, title), []).append(run)
    conditions = list(dict.fromkeys(condition for _, condition in by_line))
    names = list(dict.fromkeys(name for name, _ in by_line))
    of_name = {name: colors[own[0].target] for (name, _), own in reversed(by_line.items())}
    drawn = []
    for measure, of in measures:
        lines = []
        for (name, condition), own in by_line.items():
            points = [(x, y) for run in own if (x := varied(run)) is not None and (y := of(run)) is not None]
            if points:
                label_of_line = ", ".join(word for word in (name, condition) if word)
                dash = names.index(name) if len(conditions) == 1 else conditions.index(condition)
                lines.append(Line(label_of_line, of_name[name], sorted(points), dash))
        reference = 1.0 if "speedup" in measure else None
        axes = Axis(label, logarithmic=logarithmic, at=values if len(values) <= 8 else None), Axis("", from_zero=True)
        drawn.append(line_figure(measure, lines, *axes, reference=reference))
    key: list[tuple[str, str, int | None]] = [
        (name, of_name[name], index if len(conditions) == 1 else None) for index, name in enumerate(names)
    ]
    if len(conditions) > 1:
        key += [(condition, "var(--ink)", dash) for dash, condition in enumerate(conditions)]
    if any(drawn):
        yield section(title, legend(key), figures(*drawn))


def _line(run: Run, runs: Sequence[Run], varied: str) -> tuple[str, str]:
    """Return target and condition of the line that a run belongs to; the condition names what else varies."""
    name = run.target.removesuffix(f" k={run.k}") if varied == "Drafted tokens" else run.target
    words = []
    if varied != "Load" and len({other.load for other in runs}) > 1:
        words.append(str(run.load))
    if varied != "Temperature" and len({other.temperature for other in runs}) > 1 and run.temperature is not None:
        words.append(f"T={run.temperature:g}")
    return name, ", ".join(words)
