"""Measure shadow drafting after a cold start: `python -m benchmarks.routing.cold_start FOLDER [--pool P] [--seeds N]`.

The workloads are those of `benchmarks.routing` (see there for FOLDER). `learned` begins with only its calibration, once
with shadow drafting on every finished text and once without. Each figure is the mean end-to-end time relative to
`least_loaded` on the same arrivals, for the first 250 and 500 requests and for the 500 after them, as a geometric mean
over mixes, loads and seeds. The last column is the time with shadow drafting over the time without, with its 95%
interval over runs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import fmean, stdev

from benchmarks.routing.ground import POOLS, Ground, Task, drawn, ground_of, pool_of, timed
from lab.replay.simulate import replay
from policies.balancing.least_loaded import LeastLoaded
from policies.balancing.load_policy import LoadSettings
from policies.learned.policy import Learned, LearnedSettings
from policies.learned.shadow_drafting import ShadowSettings
from policies.policy import Policy

REQUESTS = 1000
PARTS = {"first 250": slice(250), "first 500": slice(500), "501 to 1,000": slice(500, 1000)}
MIXES = ("even", "templates")
LOADS = (0.25, 0.75)


def factories(seed: int) -> dict[str, Callable[[], Policy | None]]:
    """Return a function per policy that makes a new instance."""
    without = ShadowSettings(sample=0)
    return {
        "least_loaded": lambda: LeastLoaded(LoadSettings(seed=seed)),
        "without": lambda: Learned(LearnedSettings(seed=seed, shadow_drafting=without)),
        "with": lambda: Learned(LearnedSettings(seed=seed)),
        "oracle": lambda: None,
    }


def play(ground: Ground, task: Task) -> dict[str, dict[str, float]]:
    """Return the logarithm of the mean time over that of `least_loaded`, by policy and part."""
    requests = timed(ground, task, drawn(ground.requests, task.mix, REQUESTS, Random(task.seed)))
    logs: dict[str, dict[str, float]] = {}
    for name, make in factories(task.seed).items():
        e2e_s = replay(pool_of(task.pool), requests, make(), seed=task.seed).e2e_s
        logs[name] = {part: math.log(e2e_s[which].mean()) for part, which in PARTS.items()}
    least = logs.pop("least_loaded")
    return {name: {part: value - least[part] for part, value in parts.items()} for name, parts in logs.items()}


def main() -> None:
    """Play all runs, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pool", choices=list(POOLS), default="b/n/s/e")
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    ground = ground_of(arguments.folder, None, False)
    tasks = [
        Task(arguments.pool, mix, load, "poisson", seed)
        for mix in MIXES
        for load in LOADS
        for seed in range(arguments.seeds)
    ]
    runs = [play(ground, task) for task in tasks]
    print("| requests | without shadow drafting | with | oracle | with over without |\n|---|---|---|---|---|")
    for part in PARTS:
        means = [math.exp(fmean(run[name][part] for run in runs)) for name in ("without", "with", "oracle")]
        gains = [run["with"][part] - run["without"][part] for run in runs]
        margin = 1.96 * stdev(gains) / math.sqrt(len(gains))
        print(
            f"| {part} | {' | '.join(f'{mean:.3f}' for mean in means)} | {math.exp(fmean(gains)):.3f} ±{margin:.3f} |"
        )


if __name__ == "__main__":
    main()
