"""Report of `benchmarks.routing` as Markdown: geometric means over settings, and where `learned` loses most."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import fmean

from benchmarks.routing.ground import LOADS, POOLS, Task
from benchmarks.routing.runs import of_runs
from benchmarks.table import head, row

Results = Mapping[Task, Mapping[str, Mapping[str, float]]]
"""Figures by run of arrivals, policy and name."""


def report(results: Results) -> None:
    """Print a table for each pool, with intervals over seeds."""
    for pool in POOLS:
        of_pool = {task: figures for task, figures in results.items() if task.pool == pool}
        if not of_pool:
            continue
        first, *rest = (f"{load:.0%}" for load in LOADS)
        heads = ["policy", "mean", "99th percentile", "TTFT", "TPOT", "SLO kept", f"mean at {first}", *rest]
        print(f"\n**{pool}**\n")
        print(head(*heads))
        for name in next(iter(of_pool.values())):
            cells = [_over(of_pool, name, "mean", lambda task, load=load: task.load == load)[0] for load in LOADS]  # type: ignore[misc]
            shares = ["" if math.isnan(cell) else f"{cell:.3f}" for cell in cells]
            kept = fmean(figures[name]["kept"] for figures in of_pool.values())
            ends = [_with_interval(of_pool, name, figure) for figure in ("mean", "p99")]
            parts = [f"{_over(of_pool, name, figure)[0]:.3f}" for figure in ("ttft", "tpot")]
            print(row(name, *ends, *parts, f"{kept:.1%}", *shares))
        print(f"\n{_lost(of_pool)}")


def _with_interval(results: Results, name: str, figure: str) -> str:
    ratio, half = _over(results, name, figure)
    return f"{ratio:.3f} ±{half:.3f}"


def _over(
    results: Results, name: str, figure: str, include: Callable[[Task], bool] = lambda task: True
) -> tuple[float, float]:
    """Return the geometric mean of the ratios to least_loaded, and half the width of its 95% interval over seeds."""
    by_seed: dict[int, list[float]] = {}
    for task, figures in results.items():
        if include(task):
            ratio = figures[name][figure] / figures["least_loaded"][figure]
            by_seed.setdefault(task.seed, []).append(math.log(ratio))
    if not by_seed:
        return math.nan, math.nan
    value, half = of_runs([math.exp(fmean(logs)) for logs in by_seed.values()])
    return value, value * half


def _lost(results: Results) -> str:
    """Return the mixes and loads in which `learned` does worst beside the best fixed policy."""
    cells: dict[tuple[str, float], list[Task]] = {}
    for task in results:
        cells.setdefault((task.mix, task.load), []).append(task)
    worst = []
    for (mix, load), tasks in cells.items():
        means = {name: fmean(results[task][name]["mean"] for task in tasks) for name in results[tasks[0]]}
        fixed = {name: mean for name, mean in means.items() if name.startswith("all to") or name in _FIXED}
        best = min(fixed, key=fixed.__getitem__)
        worst.append((means["learned"] / fixed[best] - 1.0, mix, load, best))
    nearest = "; ".join(
        f"{mix} at load {load:g}: {ratio:+.1%} of {best}" for ratio, mix, load, best in sorted(worst, reverse=True)[:2]
    )
    return f"`learned` over the best fixed policy, at worst: {nearest}."


_FIXED = ("least_loaded", "round_robin")
