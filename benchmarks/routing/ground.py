"""Pools, mixes and loads of the routing benchmarks, and the recorded requests that they use."""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from backends.backend import Backend
from backends.draft_schedule import draft_tokens
from backends.speculation import Method
from lab.simulation.replica_spec import ReplicaSpec
from lab.simulation.request import ReplayRequest, replay_request
from lab.simulation.simulate import replay
from lab.trace.edits import draw
from lab.trace.record import TraceRecord
from policies.learned.policy import Learned
from policies.learned.settings import LearnedSettings
from policies.learned.thresholds import rules_of
from policies.policy import Policy, policies
from policies.rules.policy import ThresholdSettings
from policies.statistics import Key, Sums

WORKLOADS = {"sharegpt": "chat", "instructcoder": "code", "gsm8k": "math", "cnn": "summarization"}
LONGEST_TOKENS = 1024
WARMUP, COUNTED = 500, 1500
"""Requests of a run in which prompts come again."""

TUNING, REPORTED = range(2)
"""The parts of the recordings, by `draw`: what is fitted or tuned here sees only the first."""

_B: tuple[Method, dict[str, Any]] = (Method.BASELINE, {})
_N: tuple[Method, dict[str, Any]] = (
    Method.NGRAM,
    {"num_speculative_tokens": 5, "prompt_lookup_min": 3, "prompt_lookup_max": 7},
)
_S = (Method.SUFFIX, {"num_speculative_tokens": 24})
_E = (Method.EAGLE3, {"num_speculative_tokens": 3})


_H100 = "llama-3.1-8b-h100"
POOLS: dict[str, tuple[str, tuple[tuple[Method, dict[str, Any]], ...]]] = {
    "b/n/s/e": (_H100, (_B, _N, _S, _E)),
    "2s/2e": (_H100, (_S, _S, _E, _E)),
    "70B": ("llama-3.1-70b-4xh100", (_B, _N, _S, _E)),
}
MIXES = ("even", "code", "chat", "templates")
LOADS = (0.02, 0.25, 0.5, 0.75, 0.95)
"""Shares of the pool's throughput with full batches (`capacity`)."""


Learning = Mapping[str, Mapping[Key, Sums]]
"""What `learned` has learned: sums by table and key."""


@dataclass(frozen=True, slots=True)
class Task:
    """One run of arrivals, which is played with every policy."""

    pool: str
    mix: str
    load: float
    arrivals: str
    seed: int


@dataclass(slots=True)
class Ground:
    """Data shared by all tasks of a process.

    Attributes
    ----------
    warm
        Statistics that `learned` collected on the development requests, by pool.
    rates
        Capacity in requests per second, by pool and mix.
    """

    requests: dict[str, list[ReplayRequest]]
    others: dict[str, list[ReplayRequest]]
    gaps_s: np.ndarray[Any, Any] | None
    warm: dict[str, Learning] = field(default_factory=dict)
    distilled: dict[str, ThresholdSettings] = field(default_factory=dict)
    rates: dict[tuple[str, str], float] = field(default_factory=dict)


def read(folder: Path, part: int) -> dict[str, list[ReplayRequest]]:
    """Return the requests of one part, by workload."""
    requests: dict[str, list[ReplayRequest]] = {}
    for dataset, workload in WORKLOADS.items():
        with gzip.open(folder / f"combined_{dataset}.jsonl.gz", "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        for row in rows:
            if draw(f"{dataset}/{row['id']}") % 2 != part:  # its own id is unique in its data set only
                continue
            output = row["generated_token_ids"]
            accepted = row["acc_eagle"]["acc_len"]
            tokens = min(len(output), len(accepted), LONGEST_TOKENS)
            if tokens < 2:
                continue
            record = TraceRecord(
                model="target",
                workload=workload,
                temperature=0.0,
                max_tokens=LONGEST_TOKENS,
                prompt_tokens=len(row["prompt_token_ids"]),
                output_tokens=tokens,
                prompt_token_ids=row["prompt_token_ids"],
                output_token_ids=output[:tokens],
                acceptance={"eagle3": accepted[:tokens]},
            )
            requests.setdefault(workload, []).append(replay_request(record, 0.0, 0.0))
    return requests


def bare(name: str, seed: int) -> Policy:
    """Return a policy by its name, without guardrail and outlier ejection around it."""
    kind = policies()[name]
    return kind(kind.Settings.model_validate({"seed": seed}))


def pool_of(name: str) -> list[ReplicaSpec]:
    """Return the replicas of a pool."""
    calibration, members = POOLS[name]
    return [
        ReplicaSpec(f"{method.value}-{number}", method, config, calibration)
        for number, (method, config) in enumerate(members)
    ]


def drawn(requests: Mapping[str, Sequence[ReplayRequest]], mix: str, count: int, rng: Random) -> list[ReplayRequest]:
    """Return random requests of a mix, of which most come again."""
    chosen = []
    for _ in range(count):
        workload = _workload(mix, rng)
        chosen.append(_declared(rng.choice(requests[workload]), mix, workload, rng))
    return chosen


def once(requests: Mapping[str, Sequence[ReplayRequest]], mix: str, rng: Random) -> list[ReplayRequest]:
    """Return requests of a mix in random order, none of them twice: until one kind of work has no more."""
    left = {workload: rng.sample(each, len(each)) for workload, each in requests.items()}
    chosen = []
    while left[workload := _workload(mix, rng)]:
        chosen.append(_declared(left[workload].pop(), mix, workload, rng))
    return chosen


def _workload(mix: str, rng: Random) -> str:
    weights = {"code": (1, 6, 1, 1), "chat": (6, 1, 1, 1)}.get(mix, (1, 1, 1, 1))
    return rng.choices(list(WORKLOADS.values()), weights)[0]


def _declared(request: ReplayRequest, mix: str, workload: str, rng: Random) -> ReplayRequest:
    """Return the request as its client sends it: with its workload, in the mix `templates` with a template instead."""
    if mix != "templates":
        return request
    client = f"{workload}-{rng.randrange(5)}"  # twenty clients
    return replace(request, features=replace(request.features, workload="", template=client))


def run_of(ground: Ground, task: Task) -> tuple[list[ReplayRequest], int]:
    """Return the requests of a run with their times, and how many are warm-up: those of the tuning part."""
    rng = Random(task.seed)
    warmup = once(ground.others, task.mix, rng)
    return timed(ground, task, warmup + once(ground.requests, task.mix, rng)), len(warmup)


def capacity(ground: Ground, pool: str, mix: str) -> float:
    """Return the throughput of a pool in requests per second, from 1,500 requests that arrive at once."""
    known = ground.rates.get((pool, mix))
    if known is None:
        requests = drawn(ground.requests, mix, WARMUP + COUNTED, Random(0))[-COUNTED:]
        known = ground.rates[pool, mix] = throughput(pool_of(pool), requests)
    return known


def throughput(specs: Sequence[ReplicaSpec], requests: Sequence[ReplayRequest]) -> float:
    """Return the requests per second that replicas serve if all arrive at once."""
    played = replay(specs, requests, None)
    # The last few requests run alone, so only the time of the first 90% of the tokens counts.
    order = np.argsort(played.e2e_s)
    done = np.cumsum(played.output_tokens[order]) / played.output_tokens.sum()
    return 0.9 * len(requests) / float(played.e2e_s[order][np.searchsorted(done, 0.9)])


def timed(ground: Ground, task: Task, requests: Sequence[ReplayRequest]) -> list[ReplayRequest]:
    """Return the requests with arrival times: Poisson, or the gaps of Azure's trace, scaled to the load."""
    rate = task.load * capacity(ground, task.pool, task.mix)
    rng = np.random.default_rng(task.seed)
    if task.arrivals == "azure" and ground.gaps_s is not None:
        start = int(rng.integers(len(ground.gaps_s) - len(requests)))
        gaps_s = ground.gaps_s[start : start + len(requests)]
        gaps_s = gaps_s / gaps_s.mean() / rate
    else:
        gaps_s = rng.exponential(1.0 / rate, len(requests))
    return [replace(request, arrived_s=float(at_s)) for request, at_s in zip(requests, np.cumsum(gaps_s), strict=True)]


def prepare(ground: Ground, pool: str) -> None:
    """Train `learned` on the development requests at medium load, and make the rules of its table."""
    if pool in ground.warm:
        return
    requests = drawn(ground.others, "even", WARMUP + COUNTED, Random(99))
    task = Task(pool, "even", 0.5, "poisson", 99)
    policy = Learned(LearnedSettings(seed=99))
    specs = pool_of(pool)
    replay(specs, timed(ground, task, requests), policy)
    ground.warm[pool] = {name: policy.statistics.buckets(table) for name, table in policy.statistics.tables.items()}
    ground.distilled[pool] = distilled_rules(policy, specs)


def teach(policy: Learned, learning: Learning) -> None:
    """Load what another policy has learned into a policy, as if other gateways had just observed it."""
    policy.set_clock(lambda: 0.0)
    for name in policy.statistics.tables:
        policy.statistics.set_others_of(name, 0, learning[name])


def distilled_rules(policy: Learned, specs: Sequence[ReplicaSpec]) -> ThresholdSettings:
    """Return what the table of a learned policy says, as rules."""
    candidates = [
        Backend(spec.name, "target", spec.method, "", draft_tokens(spec.method, spec.config), spec.config)
        for spec in specs
    ]
    return rules_of(policy.known, candidates).settings


@cache
def ground_of(folder: Path, azure: Path | None, tune: bool) -> Ground:
    """Return the data of the tasks, read from the recordings."""
    gaps_s = None
    if azure is not None:
        from lab.trace.read import read_trace

        times = [record.arrived_at for record in read_trace([azure], in_order=True) if record.arrived_at is not None]
        gaps_s = np.array([later - earlier for earlier, later in pairwise(times)])
    parts = (TUNING, REPORTED) if tune else (REPORTED, TUNING)
    reported, others = (read(folder, part) for part in parts)
    return Ground(reported, others, gaps_s)


def options(about: str | None) -> argparse.ArgumentParser:
    """Return the options that say what the ground is."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the recordings")
    parser.add_argument("--azure", type=Path, help="trace of which some runs take the gaps between arrivals")
    parser.add_argument("--tune", action="store_true", help="report the half of the requests that is for development")
    return parser


@dataclass(frozen=True, slots=True)
class OnGround:
    """Applies a function to the recordings, which each process reads once, and a task."""

    function: Callable[[Ground, Any], Any]
    folder: Path
    azure: Path | None = None
    tune: bool = False

    def __call__(self, task: Any) -> Any:
        return self.function(ground_of(self.folder, self.azure, self.tune), task)
