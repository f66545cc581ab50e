"""Measure routing over engines whose k depends on the batch: `python -m benchmarks.routing.adaptive FOLDER`.

FOLDER and the requests are those of `benchmarks.routing`. Each pool is played without and with schedules of k by batch
size for its EAGLE-3 replicas, at the same arrivals: a schedule with round bounds, and the best one, which has for each
batch size the k with the most tokens per second, given the acceptance of the development half. Prints mean times to
finish, and their ratios to `least_loaded` on the same pool. `unaware` is `learned` that takes k as fixed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from backends.backend import Candidate
from backends.calibration.calibration import load_calibration
from backends.draft_schedule import DraftSchedule
from backends.simulator.engine.replica import Replica
from backends.speculation import Method
from benchmarks.routing.ground import COUNTED, WARMUP, Ground, drawn, ground_of
from lab.replay.request import ReplayRequest
from lab.replay.simulate import ReplicaSpec, learned_rows, replay, set_learned
from policies.balancing.least_loaded import LeastLoaded
from policies.balancing.load_policy import LoadSettings
from policies.features.request import RequestFeatures
from policies.learned.models.prior import expected_step
from policies.learned.policy import Learned, LearnedSettings
from policies.learned.shadow_drafting import steps_of
from policies.policy import Decision, Policy
from policies.statistics import Row

K = 3
SHOWN = ("learned", "unaware", "learned, rush", "unaware, rush", "oracle")
POOLS = {"4e": "eeee", "2s/2e": "ssee", "b/n/s/e": "bnse"}
RUSH = 1.3
LOADS = (0.25, 0.5, 0.75, 0.95, 1.1, 1.3)
ROUND = [[1, 48, 3], [49, 96, 2], [97, 192, 1], [193, 1024, 0]]
CONFIGS: dict[str, tuple[Method, dict[str, Any]]] = {
    "b": (Method.BASELINE, {}),
    "n": (Method.NGRAM, {"num_speculative_tokens": 5, "prompt_lookup_min": 3, "prompt_lookup_max": 7}),
    "s": (Method.SUFFIX, {"num_speculative_tokens": 24}),
    "e": (Method.EAGLE3, {"num_speculative_tokens": K}),
}


class Unaware(Learned):
    """`learned` that takes the k of every replica as fixed."""

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Choose as if no candidate had a schedule."""
        for candidate in candidates:
            assert isinstance(candidate, Replica)
            candidate.draft_schedule = DraftSchedule(candidate.num_speculative_tokens)
        return super().choose(request, candidates)


class Run(NamedTuple):
    """One run of arrivals on one pool."""

    pool: str
    schedule: str
    mix: str
    load: float
    seed: int


def best_schedule(calibration: str, requests: Mapping[str, Sequence[ReplayRequest]]) -> list[list[int]]:
    """Return for each batch size the k of the most tokens per second, for an even mix of workloads."""
    sample = [request for each in requests.values() for request in each[:40]]
    context = np.mean([request.prompt_tokens + request.output_tokens / 2 for request in sample])
    per_step = [1.0] + [_tokens_per_step(sample, k) for k in range(1, K + 1)]
    costs = [expected_step(calibration, Method.EAGLE3, k) for k in range(1, K + 1)]
    costs.insert(0, expected_step(calibration, Method.BASELINE, 0))
    ranges: list[list[int]] = []
    for batch in range(1, load_calibration(calibration).scheduler.max_num_seqs + 1):
        rates = [
            tokens / (cost.base_s + batch * (cost.per_request_s + cost.per_context_token_s * context))
            for tokens, cost in zip(per_step, costs, strict=True)
        ]
        k = int(np.argmax(rates))
        if ranges and ranges[-1][2] == k:
            ranges[-1][1] = batch
        else:
            ranges.append([batch, batch, k])
    return ranges


def _tokens_per_step(sample: Sequence[ReplayRequest], k: int) -> float:
    scripts = [request.script(Method.EAGLE3, k, {}) for request in sample]
    steps = sum(steps_of(script.emitted) for script in scripts if script is not None)
    return sum(request.output_tokens for request in sample) / steps


class Worker:
    """The recordings, and what is computed from them once."""

    def __init__(self, folder: Path, calibration: str, tune: bool, policies: Sequence[str]) -> None:
        self._policies = policies
        self._ground: Ground = ground_of(folder, None, tune)
        self._calibration = calibration
        best = best_schedule(calibration, self._ground.others)
        self.schedules: dict[str, list[list[int]]] = {
            "fixed": [],
            "round": ROUND,
            "best": best,
            "low": [[1, 8, 3], [9, 32, 2], [33, 1024, 0]],
        }
        self._capacity = cache(self._measured_capacity)
        self._rush = cache(self._measured_rush)

    def specs(self, pool: str, schedule: str) -> list[ReplicaSpec]:
        """Return the replicas of a pool."""
        specs = []
        for number, letter in enumerate(POOLS[pool]):
            method, config = CONFIGS[letter]
            ranges = self.schedules[schedule]
            if method is Method.EAGLE3 and ranges:
                config = {**config, "num_speculative_tokens_per_batch_size": ranges}
            specs.append(ReplicaSpec(f"{method.value}-{number}", method, config, self._calibration))
        return specs

    def _measured_capacity(self, pool: str, mix: str) -> float:
        """Return the throughput in requests per second without a schedule, as `ground.capacity` measures it."""
        requests = drawn(self._ground.requests, mix, WARMUP + COUNTED, Random(0))[-COUNTED:]
        played = replay(self.specs(pool, "fixed"), requests, None)
        order = np.argsort(played.e2e_s)
        done = np.cumsum(played.output_tokens[order]) / played.output_tokens.sum()
        return 0.9 * COUNTED / float(played.e2e_s[order][np.searchsorted(done, 0.9)])

    def _timed(self, run: Run, requests: Sequence[ReplayRequest]) -> list[ReplayRequest]:
        rate = run.load * self._capacity(run.pool, run.mix)
        at_s = np.cumsum(np.random.default_rng(run.seed).exponential(1.0 / rate, len(requests)))
        return [replace(request, arrived_s=float(when)) for request, when in zip(requests, at_s, strict=True)]

    def _measured_rush(self, pool: str, schedule: str, mix: str, kind: type[Learned]) -> list[Row]:
        """Return what `learned` learns at the highest load, from the development half."""
        requests = drawn(self._ground.others, mix, WARMUP + COUNTED, Random(99))
        policy = kind(LearnedSettings(seed=99))
        replay(self.specs(pool, schedule), self._timed(Run(pool, schedule, mix, RUSH, 99), requests), policy)
        return learned_rows(policy)

    def play(self, run: Run) -> dict[str, float]:
        """Return the mean seconds to finish under each policy."""
        requests = self._timed(run, drawn(self._ground.requests, run.mix, WARMUP + COUNTED, Random(run.seed)))
        specs, seed = self.specs(run.pool, run.schedule), run.seed

        def made(name: str) -> Policy | None:
            if name == "oracle":
                return None
            if name == "least_loaded":
                return LeastLoaded(LoadSettings(seed=seed))
            kind = Unaware if name.startswith("unaware") else Learned
            policy = kind(LearnedSettings(seed=seed))
            if name.endswith("rush"):
                set_learned(policy, self._rush(run.pool, run.schedule, run.mix, kind), 0.0)
            return policy

        return {
            name: float(replay(specs, requests, made(name), seed=seed, warmup=WARMUP).e2e_s.mean())
            for name in ("least_loaded", *self._policies)
        }


_worker: list[Worker] = []


def _start(folder: Path, calibration: str, tune: bool, policies: Sequence[str]) -> None:
    _worker[:] = [Worker(folder, calibration, tune, policies)]


def _play(run: Run) -> tuple[Run, dict[str, float]]:
    return run, _worker[0].play(run)


def main() -> None:
    """Play all runs, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the recordings")
    parser.add_argument("--calibration", default="llama-3.1-8b-h100")
    parser.add_argument("--pool", action="append", choices=list(POOLS))
    parser.add_argument("--schedule", action="append", choices=["fixed", "round", "best", "low"])
    parser.add_argument("--policy", action="append", choices=SHOWN)
    parser.add_argument("--load", action="append", type=float)
    parser.add_argument("--mix", default="even")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tune", action="store_true", help="report the half of the requests that is for development")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="file to write all figures to")
    arguments = parser.parse_args()
    runs = [
        Run(pool, schedule, arguments.mix, load, seed)
        for pool in arguments.pool or POOLS
        for load in arguments.load or LOADS
        for schedule in arguments.schedule or ("fixed", "round", "best")
        for seed in range(arguments.seeds)
    ]
    results: dict[Run, dict[str, float]] = {}
    policies = arguments.policy or SHOWN
    initial = (arguments.folder, arguments.calibration, arguments.tune, policies)
    with get_context("spawn").Pool(arguments.jobs, _start, initial) as workers:
        for number, (run, figures) in enumerate(workers.imap_unordered(_play, runs), 1):
            results[run] = figures
            print(f"\r{number} of {len(runs)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(
        f"{'pool':8} {'load':>5} {'k':6} {'least_loaded':>13} "
        + " ".join(f"{name:>{max(8, len(name))}}" for name in policies)
    )
    for first in [run for run in runs if run.seed == 0]:
        of_seeds = [results[first._replace(seed=seed)] for seed in range(arguments.seeds)]
        plain_s = float(np.mean([each["least_loaded"] for each in of_seeds]))
        shown = " ".join(f"{_ratio(of_seeds, name):{max(8, len(name))}.3f}" for name in policies)
        print(f"{first.pool:8} {first.load:5.0%} {first.schedule:6} {plain_s:11.3f} s {shown}")
    if arguments.json is not None:
        rows = [{**run._asdict(), **results[run]} for run in runs]
        arguments.json.write_text(json.dumps(rows), encoding="utf-8")


def _ratio(figures: Sequence[Mapping[str, float]], name: str) -> float:
    return float(np.mean([each[name] / each["least_loaded"] for each in figures]))


if __name__ == "__main__":
    main()
