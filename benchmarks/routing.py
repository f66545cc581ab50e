"""What routing is worth: `python -m benchmarks.routing FOLDER [--azure TRACE.csv.gz] [--seeds N] [--quick] [--json F]`.

FOLDER holds the recordings of SpecDecode-Bench (`combined_*.jsonl.gz`, arXiv 2601.11580), which are not part of the
project: Llama-3.1-8B, greedy. Every request plays its recorded steps on whichever replica it is sent to: n-gram and
suffix drafting replayed on its text, EAGLE-3 as recorded; so what a policy decides decides what the others meet.
Answers end at 1,024 tokens: a few that repeat themselves without end would carry most of every average. Step times of
other targets come from their calibrations, acceptance always from these recordings.

Requests of odd place in their file are what is reported, and those of even place what the warm policy and the rules
learned from (`--tune` turns that round). The first 500 requests of each run warm up and do not count. Each cell is the
mean over seeds of a ratio to `least_loaded` in the same run of arrivals. A third of the
requests, drawn, ask for the median TPOT of `least_loaded` in that run; "SLO kept" is the share of those that get it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from random import Random

import numpy as np

from benchmarks.routing_ground import (
    COUNTED,
    LOADS,
    LONGEST_TOKENS,
    MIXES,
    POOLS,
    WARMUP,
    Ground,
    Task,
    drawn,
    ground_of,
    pool_of,
    prepare,
    timed,
)
from benchmarks.routing_peers import Greedy, LatencyRegression
from benchmarks.routing_report import report
from lab.replay.simulate import replay, set_learned
from policies.learned.cost import Objective
from policies.learned.policy import Learned, LearnedSettings
from policies.load_balancing import LeastLoaded, LoadSettings, RoundRobin, Static, StaticSettings
from policies.policy import Policy, PolicySettings
from policies.rules.policy import Thresholds, ThresholdSettings

HURRIED = 1 / 3
"""Share of requests with an SLO."""


def makers(ground: Ground, task: Task) -> dict[str, Callable[[], Policy | None]]:
    """Return how each policy is made, fresh."""
    seed = task.seed

    def warm() -> Learned:
        policy = Learned(LearnedSettings(seed=seed))
        set_learned(policy, ground.warm[task.pool], 0.0)
        return policy

    made: dict[str, Callable[[], Policy | None]] = {
        "least_loaded": lambda: LeastLoaded(LoadSettings(seed=seed)),
        "round_robin": lambda: RoundRobin(PolicySettings()),
        "thresholds": lambda: Thresholds(ThresholdSettings(seed=seed)),
        "greedy": lambda: Greedy(LearnedSettings(seed=seed)),
        "latency_regression": lambda: LatencyRegression(PolicySettings()),
        "learned": lambda: Learned(LearnedSettings(seed=seed)),
        "learned warm": warm,
        "distilled": lambda: Thresholds(ground.distilled[task.pool].settings),
        "oracle": lambda: None,
    }
    for method in sorted({method for method, _ in POOLS[task.pool][1]}):
        made[f"all to {method}"] = lambda method=method: Static(  # type: ignore[misc]
            StaticSettings(method=method, seed=seed)
        )
    return made


def play(ground: Ground, task: Task) -> dict[str, dict[str, float]]:
    """Play one run of arrivals with every policy; return its figures by policy."""
    prepare(ground, task.pool)
    requests = timed(ground, task, drawn(ground.requests, task.mix, WARMUP + COUNTED, Random(task.seed)))
    made = makers(ground, task)
    made["learned goodput"] = lambda: Learned(LearnedSettings(seed=task.seed, objective=Objective.GOODPUT))
    plain = replay(pool_of(task.pool), requests, made["least_loaded"](), seed=task.seed, warmup=WARMUP)
    bound_s = float(np.nanmedian(plain.tpot_s))
    hurried = np.random.default_rng(task.seed).random(len(requests)) < HURRIED
    requests = [
        replace(one, features=replace(one.features, slo_tpot_s=bound_s)) if in_hurry else one
        for one, in_hurry in zip(requests, hurried, strict=True)
    ]
    figures = {}
    for name, make in made.items():
        began = time.process_time()
        played = replay(pool_of(task.pool), requests, make(), seed=task.seed, warmup=WARMUP)
        after_shift = played.e2e_s[COUNTED // 2 + 300 :] if task.mix == "drifting" else np.array([math.nan])
        figures[name] = {
            "mean": float(played.e2e_s.mean()),
            "p50": float(np.median(played.e2e_s)),
            "p99": float(np.percentile(played.e2e_s, 99)),
            "ttft": float(played.ttft_s.mean()),
            "tpot": float(np.nanmean(played.tpot_s)),
            "kept": float((~(played.tpot_s > bound_s))[hurried[WARMUP:]].mean()),
            "after_shift": float(after_shift.mean()),
            "cpu_s": time.process_time() - began,
        }
    figures["distilled"]["predicted_kept"] = ground.distilled[task.pool].kept_share or math.nan
    return figures


_ground: list[Ground] = []


def _begin(folder: Path, azure: Path | None, tune: bool, longest_tokens: int) -> None:
    _ground[:] = [ground_of(folder, azure, tune, longest_tokens)]


def _play(task: Task) -> tuple[Task, dict[str, dict[str, float]]]:
    return task, play(_ground[0], task)


def tasks_of(seeds: int, *, quick: bool, azure: bool) -> list[Task]:
    """Return all runs: the first two pools with every mix and load, the others with two mixes."""
    found = []
    for pool in POOLS:
        first = pool in ("b/n/s/e", "2s/2e")
        mixes = MIXES if first and not quick else ("even", "drifting")
        for mix in mixes:
            for load in LOADS if first else LOADS[1:4]:
                found += [
                    Task(pool, mix, load, "azure" if azure and seed % 2 else "poisson", seed) for seed in range(seeds)
                ]
    return found


def main() -> None:
    """Read the arguments, play everything on all cores, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the recordings are")
    parser.add_argument("--azure", type=Path, help="trace whose gaps every second seed takes")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two mixes of each pool")
    parser.add_argument("--pool", action="append", choices=list(POOLS), help="only this pool; again")
    parser.add_argument("--tune", action="store_true", help="report on the requests to develop on")
    parser.add_argument("--longest", type=int, default=LONGEST_TOKENS, help="tokens at which answers are cut")
    parser.add_argument("--json", type=Path, help="write all figures here")
    arguments = parser.parse_args()
    tasks = tasks_of(arguments.seeds, quick=arguments.quick, azure=arguments.azure is not None)
    tasks = [task for task in tasks if not arguments.pool or task.pool in arguments.pool]
    results = {}
    count = len(os.sched_getaffinity(0))
    begin = (arguments.folder, arguments.azure, arguments.tune, arguments.longest)
    with get_context("spawn").Pool(count, _begin, begin) as workers:
        for number, (task, figures) in enumerate(workers.imap_unordered(_play, tasks), 1):
            results[task] = figures
            print(f"\r{number} of {len(tasks)}", end="", file=sys.stderr, flush=True)
    ordered = {task: results[task] for task in tasks}
    report(ordered)
    if arguments.json is not None:
        rows = [
            {
                "pool": task.pool,
                "mix": task.mix,
                "load": task.load,
                "arrivals": task.arrivals,
                "seed": task.seed,
                **figures,
            }
            for task, figures in ordered.items()
        ]
        arguments.json.write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
