"""What routing is worth: `python -m benchmarks.routing FOLDER [--azure TRACE.csv.gz] [--seeds N] [--quick] [--json F]`.

FOLDER holds the recordings of SpecDecode-Bench (`combined_*.jsonl.gz`, arXiv 2601.11580), which are not part of the
project: Llama-3.1-8B, greedy. Every request plays its recorded steps on whichever replica it is sent to: n-gram and
suffix drafting replayed on its text, EAGLE-3 as recorded; so what a policy decides decides what the others meet.
Answers end at 1,024 tokens: a few that repeat themselves without end would carry most of every average. Step times of
other targets come from their calibrations, acceptance always from these recordings.

Requests of odd place in their file are what is reported, and those of even place what the warm policy and the rules
learned from (`--tune` turns that round). The first 500 requests of each run warm up and do not count. Each cell is the
mean over seeds of a ratio to `least_loaded` in the same run of arrivals.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import Any

import numpy as np

from backends.backend import Candidate
from backends.speculation import Method
from policies.distill import distill
from policies.experience import Row
from policies.fixed import LeastLoaded, LoadSettings, RoundRobin, Static, StaticSettings
from policies.learned import Learned, LearnedSettings
from policies.logged import LoggedCandidate
from policies.policy import Decision, Outcome, Policy, PolicySettings
from policies.replay import ReplicaSpec, learned_rows, replay, set_learned
from policies.replay_request import ReplayRequest, replay_request
from policies.request import RequestFeatures
from policies.thresholds import Thresholds, ThresholdSettings
from policies.trace import TraceRecord

WORKLOADS = {"sharegpt": "chat", "instructcoder": "code", "gsm8k": "math", "cnn": "summarization"}
LONGEST_TOKENS = 1024
WARMUP = 500
COUNTED = 1500

_B = (Method.BASELINE, {})
_N: tuple[Method, dict[str, Any]] = (
    Method.NGRAM,
    {"num_speculative_tokens": 5, "prompt_lookup_min": 3, "prompt_lookup_max": 7},
)
_S = (Method.SUFFIX, {"num_speculative_tokens": 24})


def _e(k: int) -> tuple[Method, dict[str, Any]]:
    return Method.EAGLE3, {"num_speculative_tokens": k}


_H100 = "llama-3.1-8b-h100"
POOLS: dict[str, tuple[str, tuple[tuple[Method, dict[str, Any]], ...]]] = {
    "b/n/s/e": (_H100, (_B, _N, _S, _e(3))),
    "2s/2e": (_H100, (_S, _S, _e(3), _e(3))),
    "8 mixed": (_H100, (_B, _N, _N, _S, _S, _e(2), _e(3), _e(5))),
    "70B": ("llama-3.1-70b-4xh100", (_B, _N, _S, _e(3))),
    "mixture of experts": ("qwen3-30b-a3b", (_B, _N, _S, _e(3))),
}
MIXES = ("even", "code", "chat", "drifting", "templates")
LOADS = (0.02, 0.25, 0.5, 0.75, 0.95)
"""Shares of what the pool carries with full batches (`capacity`)."""

Makers = Mapping[str, Callable[[], Policy | None]]


class Greedy(Learned):
    """Learned, but each request goes where it alone is fastest: the trap."""

    name = "greedy"

    def __init__(self, settings: LearnedSettings) -> None:
        super().__init__(settings)
        self._cost = lambda request, prediction: prediction.own_s


class LatencyRegression(Policy):
    """One linear regression of time to first token and per token on queue, KV use and prompt, for all backends.

    After llm-d's predicted-latency scorer, which has gradient-boosted trees on the same features; like it, it does not
    know that backends differ in more than their load.
    """

    name = "latency_regression"

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings)
        self._met: dict[int, np.ndarray[Any, Any]] = {}
        self._x: list[np.ndarray[Any, Any]] = []
        self._y: list[tuple[float, float]] = []
        self._weights = np.zeros((6, 2))
        self._rng = Random(0)

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Choose the candidate of the least predicted latency."""
        x = np.array(
            [
                (
                    1.0,
                    one.in_flight,
                    one.load.running,
                    one.load.waiting,
                    one.load.kv_usage,
                    request.prompt_tokens * 1e-3,
                )
                for one in candidates
            ]
        )
        predicted = x @ self._weights
        tokens = min(request.max_tokens or 200, 200)
        order = (
            predicted[:, 0] + tokens * predicted[:, 1] if self._y else np.array([one.in_flight for one in candidates])
        )
        best = np.flatnonzero(order <= order.min() + 1e-12)
        place = int(best[self._rng.randrange(len(best))])
        return Decision(candidates[place].name, self.name, "least_predicted", memo=x[place])

    def observe(self, outcome: Outcome) -> None:
        """Note what came of it; fit again every 50 requests, on the last 2,000."""
        if outcome.ttft_s is None or outcome.tpot_s is None or not isinstance(outcome.decision.memo, np.ndarray):
            return
        self._x.append(outcome.decision.memo)
        self._y.append((outcome.ttft_s, outcome.tpot_s))
        if len(self._y) % 50 == 0:
            x, y = np.array(self._x[-2000:]), np.array(self._y[-2000:])
            self._weights = np.linalg.solve(x.T @ x + 1e-3 * np.eye(x.shape[1]), x.T @ y)


@dataclass(frozen=True, slots=True)
class Task:
    """One run of arrivals, played with every policy."""

    pool: str
    mix: str
    load: float
    arrivals: str
    seed: int


@dataclass(slots=True)
class Ground:
    """What every task needs; one a process.

    Attributes
    ----------
    warm
        By pool: what learned had learned on the requests to develop on.
    rates
        By pool and mix: requests a second that it carries.
    """

    requests: dict[str, list[ReplayRequest]]
    others: dict[str, list[ReplayRequest]]
    gaps_s: np.ndarray[Any, Any] | None
    warm: dict[str, list[Row]] = field(default_factory=dict)
    rules: dict[str, ThresholdSettings] = field(default_factory=dict)
    rates: dict[tuple[str, str], float] = field(default_factory=dict)


def read(folder: Path, place: int, longest_tokens: int = LONGEST_TOKENS) -> dict[str, list[ReplayRequest]]:
    """Return every second request by workload."""
    found: dict[str, list[ReplayRequest]] = {}
    for dataset, workload in WORKLOADS.items():
        with gzip.open(folder / f"combined_{dataset}.jsonl.gz", "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines][place::2]
        for row in rows:
            output = row["generated_token_ids"]
            accepted = row["acc_eagle"]["acc_len"]
            tokens = min(len(output), len(accepted), longest_tokens)
            if tokens < 2:
                continue
            record = TraceRecord(
                model="target",
                workload=workload,
                temperature=0.0,
                max_tokens=longest_tokens,
                prompt_tokens=len(row["prompt_token_ids"]),
                output_tokens=tokens,
                prompt_token_ids=row["prompt_token_ids"],
                output_token_ids=output[:tokens],
                acceptance={"eagle3": accepted[:tokens]},
            )
            found.setdefault(workload, []).append(replay_request(record, 0.0, 0.0))
    return found


def pool_of(name: str) -> list[ReplicaSpec]:
    """Return the replicas of a pool."""
    calibration, members = POOLS[name]
    return [
        ReplicaSpec(f"{method.value}-{number}", method, config, calibration)
        for number, (method, config) in enumerate(members)
    ]


def drawn(requests: Mapping[str, Sequence[ReplayRequest]], mix: str, count: int, rng: Random) -> list[ReplayRequest]:
    """Return requests of a mix: declared workloads; or, for `templates`, none declared but a template per client."""
    names = list(WORKLOADS.values())
    found = []
    for number in range(count):
        weights = {"code": (1, 6, 1, 1), "chat": (6, 1, 1, 1)}.get(mix, (1, 1, 1, 1))
        if mix == "drifting":
            weights = (1, 8, 1, 1) if number > WARMUP + COUNTED // 2 else (8, 1, 1, 1)
        workload = rng.choices(names, weights)[0]
        request = rng.choice(requests[workload])
        if mix == "templates":
            client = f"{workload}-{rng.randrange(5)}"  # twenty clients
            request = replace(request, features=replace(request.features, workload="", template=client))
        found.append(request)
    return found


def capacity(ground: Ground, pool: str, mix: str) -> float:
    """Return the requests a second that a pool carries: 1,500 that come at once, over the time until all are done."""
    known = ground.rates.get((pool, mix))
    if known is None:
        requests = drawn(ground.requests, mix, WARMUP + COUNTED, Random(0))[-COUNTED:]
        played = replay(pool_of(pool), requests, None)
        # The last few run alone: what counts is how long nine in ten of the tokens took.
        order = np.argsort(played.e2e_s)
        done = np.cumsum(played.output_tokens[order]) / played.output_tokens.sum()
        at_s = float(played.e2e_s[order][np.searchsorted(done, 0.9)])
        known = ground.rates[pool, mix] = 0.9 * COUNTED / at_s
    return known


def timed(ground: Ground, task: Task, requests: Sequence[ReplayRequest]) -> list[ReplayRequest]:
    """Give requests their times of arrival: Poisson, or the gaps of Azure's trace, scaled to the load."""
    rate = task.load * capacity(ground, task.pool, task.mix)
    rng = np.random.default_rng(task.seed)
    if task.arrivals == "azure" and ground.gaps_s is not None:
        start = int(rng.integers(len(ground.gaps_s) - len(requests)))
        gaps_s = ground.gaps_s[start : start + len(requests)]
        gaps_s = gaps_s / gaps_s.mean() / rate
    else:
        gaps_s = rng.exponential(1.0 / rate, len(requests))
    return [replace(request, arrived_s=float(at_s)) for request, at_s in zip(requests, np.cumsum(gaps_s), strict=True)]


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
        "distilled": lambda: Thresholds(ground.rules[task.pool]),
        "clairvoyant": lambda: None,
    }
    for method in sorted({method for method, _ in POOLS[task.pool][1]}):
        made[f"all to {method}"] = lambda method=method: Static(  # type: ignore[misc]
            StaticSettings(method=method, seed=seed)
        )
    return made


def prepare(ground: Ground, pool: str) -> None:
    """Have learned learn on the requests to develop on, at a middling load, and distil its rules."""
    if pool in ground.warm:
        return
    requests = drawn(ground.others, "even", WARMUP + COUNTED, Random(99))
    task = Task(pool, "even", 0.5, "poisson", 99)
    policy = Learned(LearnedSettings(seed=99))
    specs = pool_of(pool)
    replay(specs, timed(ground, task, requests), policy)
    ground.warm[pool] = learned_rows(policy)
    ground.rules[pool] = distilled_rules(policy, specs)


def distilled_rules(policy: Learned, specs: Sequence[ReplicaSpec]) -> ThresholdSettings:
    """Return the rules that a learned policy comes down to."""
    candidates = [LoggedCandidate(one.name, one.method, one.config.get("num_speculative_tokens", 0)) for one in specs]
    return distill(policy, candidates).settings


def play(ground: Ground, task: Task) -> dict[str, dict[str, float]]:
    """Play one run of arrivals with every policy; return its figures by policy."""
    prepare(ground, task.pool)
    requests = timed(ground, task, drawn(ground.requests, task.mix, WARMUP + COUNTED, Random(task.seed)))
    figures = {}
    for name, make in makers(ground, task).items():
        began = time.process_time()
        played = replay(pool_of(task.pool), requests, make(), seed=task.seed, warmup=WARMUP)
        after_shift = played.e2e_s[COUNTED // 2 + 300 :] if task.mix == "drifting" else np.array([math.nan])
        figures[name] = {
            "mean": float(played.e2e_s.mean()),
            "p50": float(np.median(played.e2e_s)),
            "p99": float(np.percentile(played.e2e_s, 99)),
            "ttft": float(played.ttft_s.mean()),
            "tpot": float(np.nanmean(played.tpot_s)),
            "after_shift": float(after_shift.mean()),
            "cpu_s": time.process_time() - began,
        }
    return figures


_ground: list[Ground] = []


def _begin(folder: Path, azure: Path | None, tune: bool, longest_tokens: int) -> None:
    _ground[:] = [ground_of(folder, azure, tune, longest_tokens)]


def _play(task: Task) -> tuple[Task, dict[str, dict[str, float]]]:
    return task, play(_ground[0], task)


def ground_of(folder: Path, azure: Path | None, tune: bool, longest_tokens: int = LONGEST_TOKENS) -> Ground:
    """Read everything."""
    gaps_s = None
    if azure is not None:
        from policies.trace import read_trace

        times = [record.arrived_at for record in read_trace([azure], in_order=True) if record.arrived_at is not None]
        gaps_s = np.array([later - earlier for earlier, later in pairwise(times)])
    reported, others = (read(folder, place, longest_tokens) for place in ((0, 1) if tune else (1, 0)))
    return Ground(reported, others, gaps_s)


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


def report(results: Mapping[Task, Mapping[str, Mapping[str, float]]]) -> None:
    """Print geometric means over cells with intervals over seeds, and the cells that are lost."""
    for pool in POOLS:
        mine = {task: figures for task, figures in results.items() if task.pool == pool}
        if not mine:
            continue
        print(f"\n== {pool}: times over those of least_loaded, geometric mean over mixes and loads (95% over seeds)")
        names = list(next(iter(mine.values())))
        print(f"{'':22}{'mean':>16}{'p99':>16}{'ttft':>8}{'tpot':>8}   by load:", *(f"{load:>6g}" for load in LOADS))
        for name in names:
            cells = [_over(mine, name, "mean", lambda task, load=load: task.load == load)[0] for load in LOADS]  # type: ignore[misc]
            mean, mean_half = _over(mine, name, "mean")
            p99, p99_half = _over(mine, name, "p99")
            print(
                f"{name:22}{mean:9.3f} ±{mean_half:.3f}{p99:9.3f} ±{p99_half:.3f}"
                f"{_over(mine, name, 'ttft')[0]:8.3f}{_over(mine, name, 'tpot')[0]:8.3f}           ",
                *(f"{cell:6.3f}" for cell in cells),
            )
        _lost(mine)
        _shifted(mine)


def _over(
    results: Mapping[Task, Mapping[str, Mapping[str, float]]],
    name: str,
    figure: str,
    wanted: Callable[[Task], bool] = lambda task: True,
) -> tuple[float, float]:
    """Return the geometric mean of ratios to least_loaded, and half the width of its interval over seeds."""
    by_seed: dict[int, list[float]] = {}
    for task, figures in results.items():
        if wanted(task):
            ratio = figures[name][figure] / figures["least_loaded"][figure]
            by_seed.setdefault(task.seed, []).append(math.log(ratio))
    if not by_seed:
        return math.nan, math.nan
    means = [fmean(logs) for logs in by_seed.values()]
    half = 2.776 * stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan  # Student's t for 5 seeds
    return math.exp(fmean(means)), math.exp(fmean(means)) * half


def _lost(results: Mapping[Task, Mapping[str, Mapping[str, float]]]) -> None:
    """Print the cells in which the best fixed policy beats learned, and how far the clairvoyant choice is."""
    cells: dict[tuple[str, float], list[Task]] = {}
    for task in results:
        cells.setdefault((task.mix, task.load), []).append(task)
    worst = []
    for (mix, load), tasks in cells.items():
        means = {name: fmean(results[task][name]["mean"] for task in tasks) for name in results[tasks[0]]}
        fixed = {name: mean for name, mean in means.items() if name.startswith("all to") or name in _FIXED}
        best = min(fixed, key=fixed.__getitem__)
        worst.append((means["learned"] / fixed[best] - 1.0, mix, load, best))
    worst.sort(reverse=True)
    lost = [one for one in worst if one[0] > 0.02]
    print(f"learned more than 2% behind the best fixed policy in {len(lost)} of {len(worst)} cells; the worst:")
    for ratio, mix, load, best in worst[:4]:
        print(f"   {mix:10} load {load:4g}: {ratio:+.1%} of {best}")
    for name in ("learned", "learned warm", "distilled"):
        logs = [math.log(figures[name]["mean"] / figures["clairvoyant"]["mean"]) for figures in results.values()]
        print(f"{name} over clairvoyant: {math.exp(fmean(logs)) - 1:+.1%}")
    gain = {name: -math.log(_over(results, name, "mean")[0]) for name in ("learned warm", "distilled")}
    print(f"distilled rules keep {gain['distilled'] / gain['learned warm']:.0%} of what learned warm gains")


def _shifted(results: Mapping[Task, Mapping[str, Mapping[str, float]]]) -> None:
    drifting = [figures for task, figures in results.items() if task.mix == "drifting"]
    if drifting:
        logs = [
            math.log(figures["learned"]["after_shift"] / figures["clairvoyant"]["after_shift"]) for figures in drifting
        ]
        print(f"300 requests after the shift, learned over clairvoyant: {math.exp(fmean(logs)) - 1:+.1%}")


_FIXED = ("least_loaded", "round_robin")


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
