"""Compare policies: `python -m benchmarks.routing FOLDER [--azure TRACE.csv.gz] [--seeds N] [--quick] [--json F]`.

FOLDER holds the recordings of SpecDecode-Bench (`combined_*.jsonl.gz`, arXiv 2601.11580; Llama-3.1-8B, greedy), which
are not part of the project. Simulated replicas play the recorded steps of each request: n-gram and suffix drafting are
replayed on its text, EAGLE-3 as recorded. A policy's choices therefore determine the load that later requests meet.
Answers are cut at 1,024 tokens, because a few that repeat themselves without end would dominate every average. Step
times of other targets come from their calibrations; acceptance always comes from these recordings.

The odd-numbered requests of each file are reported; the warm policy and the distilled rules learned from the
even-numbered ones (`--tune` swaps the two halves). The first 500 requests of each run are warm-up and do not count.
Each table entry is the mean over seeds of a ratio to `least_loaded` on the same arrivals. A random third of the
requests have an SLO, the median TPOT of `least_loaded` in that run; "SLO kept" is the share of them that meet it.
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

from benchmarks.routing.ground import (
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
from benchmarks.routing.peers import Greedy, LatencyRegression
from benchmarks.routing.report import report
from lab.replay.simulate import replay, set_learned
from policies.balancing.least_loaded import LeastLoaded
from policies.balancing.load_policy import LoadSettings
from policies.balancing.round_robin import RoundRobin
from policies.balancing.static import Static, StaticSettings
from policies.learned.policy import Learned, LearnedSettings
from policies.learned.settings import Objective
from policies.policy import Policy, PolicySettings
from policies.rules.policy import Thresholds, ThresholdSettings

SLO_SHARE = 1 / 3
"""Share of requests with an SLO."""


def makers(ground: Ground, task: Task) -> dict[str, Callable[[], Policy | None]]:
    """Return a function per policy that makes a new instance."""
    seed = task.seed

    def warm() -> Learned:
        policy = Learned(LearnedSettings(seed=seed))
        set_learned(policy, ground.warm[task.pool], 0.0)
        return policy

    factories: dict[str, Callable[[], Policy | None]] = {
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
        factories[f"all to {method}"] = lambda method=method: Static(  # type: ignore[misc]
            StaticSettings(method=method, seed=seed)
        )
    return factories


def play(ground: Ground, task: Task) -> dict[str, dict[str, float]]:
    """Play one run of arrivals with every policy; return the figures of each policy."""
    prepare(ground, task.pool)
    requests = timed(ground, task, drawn(ground.requests, task.mix, WARMUP + COUNTED, Random(task.seed)))
    factories = makers(ground, task)
    factories["learned goodput"] = lambda: Learned(LearnedSettings(seed=task.seed, objective=Objective.GOODPUT))
    plain = replay(pool_of(task.pool), requests, factories["least_loaded"](), seed=task.seed, warmup=WARMUP)
    bound_s = float(np.nanmedian(plain.tpot_s))
    has_slo = np.random.default_rng(task.seed).random(len(requests)) < SLO_SHARE
    requests = [
        replace(request, features=replace(request.features, slo_tpot_s=bound_s)) if with_slo else request
        for request, with_slo in zip(requests, has_slo, strict=True)
    ]
    figures = {}
    for name, make in factories.items():
        began = time.process_time()
        played = replay(pool_of(task.pool), requests, make(), seed=task.seed, warmup=WARMUP)
        after_shift = played.e2e_s[COUNTED // 2 + 300 :] if task.mix == "drifting" else np.array([math.nan])
        figures[name] = {
            "mean": float(played.e2e_s.mean()),
            "p50": float(np.median(played.e2e_s)),
            "p99": float(np.percentile(played.e2e_s, 99)),
            "ttft": float(played.ttft_s.mean()),
            "tpot": float(np.nanmean(played.tpot_s)),
            "kept": float((~(played.tpot_s > bound_s))[has_slo[WARMUP:]].mean()),
            "after_shift": float(after_shift.mean()),
            "cpu_s": time.process_time() - began,
        }
    figures["distilled"]["predicted_kept"] = ground.distilled[task.pool].kept_share or math.nan
    return figures


_ground: list[Ground] = []


def _start_worker(folder: Path, azure: Path | None, tune: bool, longest_tokens: int) -> None:
    _ground[:] = [ground_of(folder, azure, tune, longest_tokens)]


def _play(task: Task) -> tuple[Task, dict[str, dict[str, float]]]:
    return task, play(_ground[0], task)


def tasks_of(seeds: int, *, quick: bool, azure: bool) -> list[Task]:
    """Return all runs: every mix and load for the first two pools, two mixes for the others."""
    tasks = []
    for pool in POOLS:
        first = pool in ("b/n/s/e", "2s/2e")
        mixes = MIXES if first and not quick else ("even", "drifting")
        for mix in mixes:
            for load in LOADS if first else LOADS[1:4]:
                tasks += [
                    Task(pool, mix, load, "azure" if azure and seed % 2 else "poisson", seed) for seed in range(seeds)
                ]
    return tasks


def main() -> None:
    """Play all runs on all cores, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the recordings")
    parser.add_argument("--azure", type=Path, help="trace of which every second seed takes the gaps between arrivals")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="only two mixes per pool")
    parser.add_argument("--pool", action="append", choices=list(POOLS), help="only this pool; may be repeated")
    parser.add_argument("--tune", action="store_true", help="report the half of the requests that is for development")
    parser.add_argument("--longest", type=int, default=LONGEST_TOKENS, help="tokens at which answers are cut")
    parser.add_argument("--json", type=Path, help="file to write all figures to")
    arguments = parser.parse_args()
    tasks = tasks_of(arguments.seeds, quick=arguments.quick, azure=arguments.azure is not None)
    tasks = [task for task in tasks if not arguments.pool or task.pool in arguments.pool]
    results = {}
    count = len(os.sched_getaffinity(0))
    initial = (arguments.folder, arguments.azure, arguments.tune, arguments.longest)
    with get_context("spawn").Pool(count, _start_worker, initial) as workers:
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
