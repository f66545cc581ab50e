"""A benchmark as one HTML page: what varies with rate, temperature and k, and where speculation loses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from lab.bench.run import Run
from lab.bench.show import ratio_text, remarks, title_of
from lab.report.charts import Line
from lab.report.colors import backend_colors
from lab.report.distributions import line_figure
from lab.report.page import figures, legend, listed, page, section
from lab.report.scale import Axis

Value = Callable[[Run], float | None]

_VARIED: Mapping[str, Value] = {
    "Requests/s": lambda run: run.rate,
    "Temperature": lambda run: run.temperature,
    "Drafted tokens (k)": lambda run: run.target.k if run.target.varies_k else None,
}
_MEASURES: Mapping[str, Value] = {
    "Time per output token, speedup over the baseline": lambda run: (
        run.speedup.tpot.value if run.speedup and run.speedup.tpot else None
    ),
    "Mean time per output token, ms": lambda run: _milliseconds(run, "tpot_s"),
    "Mean time to first token, ms": lambda run: _milliseconds(run, "ttft_s"),
    "Output tokens/s": lambda run: float(run.figures["output_tokens_per_s"]),
    "Accepted share of drafted tokens": lambda run: run.acceptance.rate if run.acceptance else None,
    "Output tokens per step": lambda run: run.acceptance.tokens_per_step if run.acceptance else None,
}


def bench_page(runs: Sequence[Run], not_measured: Mapping[str, str]) -> str:
    """Return the page."""
    answered = [run for run in runs if run.outcome.done]
    colors = backend_colors({run.target.replica: run.target.method for run in runs})
    body = [
        legend(((name, color, None) for name, color in colors.items()), sticky=True),
        section("Where speculation loses", listed(_losses(answered))) if any(run.speedup for run in runs) else "",
        *(_sweep(answered, varied, colors) for varied in _VARIED),
        section("Notes", listed(remarks(runs, not_measured))),
    ]
    models = ", ".join(dict.fromkeys(run.outcome.model for run in runs)) or "nothing measured"
    return page("gateway bench", models, [], body)


def _losses(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the runs that are slower than the baseline beyond the interval."""
    lost = [
        f"{run.target.name} at {title_of(run.condition)}: time per output token, x {ratio_text(run.speedup.tpot)}"
        for run in runs
        if run.speedup is not None and run.speedup.tpot is not None and run.speedup.tpot.high < 1
    ]
    yield from lost or ["Nowhere beyond the interval."]


def _sweep(runs: Sequence[Run], varied: str, colors: Mapping[str, str]) -> str:
    """Return a section on what was varied, with a line for each replica and each other condition."""
    points = [(x, run) for run in runs if (x := _VARIED[varied](run)) is not None]
    values = sorted({x for x, _ in points})
    if len(values) < 2:
        return ""
    names = list(dict.fromkeys(_line_name(run, runs, varied) for _, run in points))
    color_of = {_line_name(run, runs, varied): colors[run.target.replica] for _, run in points}
    drawn = []
    for measure, value_of in _MEASURES.items():
        curves: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for x, run in points:
            if (y := value_of(run)) is not None:
                curves[_line_name(run, runs, varied)].append((x, y))
        lines = [
            Line(name, color_of[name], sorted(own), dash) for dash, (name, own) in enumerate(curves.items()) if own
        ]
        axis = Axis(varied, at=values if len(values) <= 8 else None)
        reference = 1.0 if "speedup" in measure else None
        drawn.append(line_figure(measure, lines, axis, Axis("", from_zero=True), reference=reference))
    return section(varied, legend((name, color_of[name], dash) for dash, name in enumerate(names)), figures(*drawn))


def _line_name(run: Run, runs: Sequence[Run], varied: str) -> str:
    """Return the name of the line that a run belongs to: its replica, and what else was varied."""
    words = [run.target.replica]
    for other, value_of in _VARIED.items():
        if other != varied and len({value_of(each) for each in runs}) > 1 and value_of(run) is not None:
            words.append(f"{other} {value_of(run):g}")
    return ", ".join(words)


def _milliseconds(run: Run, name: str) -> float | None:
    mean_s = run.figures[name]["mean"]
    return None if mean_s is None else 1e3 * mean_s
