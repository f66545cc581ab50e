"""Routing to warm prefix caches: `python -m benchmarks.routing.sessions AGENTS [--mooncake TRACE] [--seeds N]`.

AGENTS is a folder of sessions of coding agents (kv-cache-tester), played in a closed loop: the next request comes its
think time after the last answer. A Mooncake trace is played by its times. Neither is part of the project. Requests
beyond the target's context (131,072 tokens) are left out. One part of the sessions (`draw`) and the second half of the
trace are reported, with `--tune` the others.

With `--gateways N` each request goes through one of N gateways, which tell each other where they send prompts; with
`--kv SHARE` the engines have that share of their KV cache, and so evict more; with `--restart` each engine is drained
and restarts once, one after another. `events` is `learned` that hears what the engines evict.

Loads are requests per second that arrive if answers take no longer than recorded. The first fifth of the requests are
warm-up. Cells are mean times to finish over that of the best of `least_loaded`, prefix affinity alone and `lmetric`,
with the 95% interval over seeds for `learned`.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache, partial
from itertools import product
from math import inf
from pathlib import Path
from random import Random
from statistics import fmean, geometric_mean
from typing import NamedTuple

from backends.backend import Candidate
from backends.calibration.load import load_calibration
from backends.calibration.parameters import EngineParameters
from benchmarks.routing.gateways import Gateways
from benchmarks.routing.ground import POOLS, REPORTED, TUNING, bare
from benchmarks.routing.runs import of_runs
from lab.parallel import all_cores
from lab.replay.pace import arrivals
from lab.simulation.replica_spec import ReplicaSpec
from lab.simulation.simulate import replay
from lab.simulation.table import RequestTable, request_table
from lab.trace.edits import draw
from lab.trace.read import read_trace
from lab.trace.record import TraceRecord
from policies.balancing.lmetric import LMetric
from policies.features.request import RequestFeatures
from policies.load_policy import LoadSettings
from policies.policy import Policy

CONTEXT = 131_072
_H100 = "llama-3.1-8b-h100"
_B, _N, _S, _E = POOLS["b/n/s/e"][1]
MEMBERS = {"4e": (_E,) * 4, "4s": (_S,) * 4, "4b": (_B,) * 4, "b/n/s/e": (_B, _N, _S, _E), "2s/2e": (_S, _S, _E, _E)}
TRAFFIC = ("agents", "mooncake")
LOADS = (0.5, 2.0, 4.0)
MOST = 1.02
"""Ratio above which a cell is listed."""
COPIES = 10
BASELINES = ("least_loaded", "affinity", "lmetric")


class Affinity(LMetric):
    """Prefix affinity alone: the longest expected prefix, and among equals the least loaded."""

    name = "affinity"

    def _scores(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[tuple[float, float, int]]:
        return [(new + 1e-6 * count, new, count) for _, new, count in super()._scores(request, candidates)]


class Task(NamedTuple):
    """One run of arrivals, played with every policy; `load` in requests per second."""

    traffic: str
    pool: str
    load: float
    seed: int


class World(NamedTuple):
    """What is beside the replicas."""

    gateways: int
    kv: float  # share of the KV cache that the engines have
    restart: bool


POLICIES = (*BASELINES, "learned", "events")


def short(records: Sequence[TraceRecord]) -> list[TraceRecord]:
    """Return the requests that fit into the context."""
    return [one for one in records if one.prompt_tokens + (one.output_tokens or 0) <= CONTEXT]


def records_of(traffic: str, folder: Path, mooncake: Path | None, *, tune: bool) -> list[TraceRecord]:
    """Return one half of the requests."""
    if traffic == "mooncake":
        assert mooncake is not None
        records = short(list(read_trace([mooncake])))
        half = len(records) // 2
        return records[:half] if tune else records[half:]
    part = TUNING if tune else REPORTED
    paths = [path for path in sorted(folder.glob("*.json.gz")) if draw(path.name) % 2 == part]
    return [one for path in paths for one in short(list(read_trace([path])))]


def arrived(table: RequestTable, task: Task) -> RequestTable:
    """Return the requests of a task with their times."""
    if task.traffic == "agents":
        return table.in_sessions(task.load, 1.0, COPIES, task.seed)
    count = len(table) // 2
    start = Random(task.seed).randrange(len(table) - count)
    window = table[start : start + count]
    return window.paced(arrivals(window.arrived_at, task.load, 1.0, task.seed))


@cache
def table_of(traffic: str, folder: Path, mooncake: Path | None, tune: bool) -> RequestTable:
    """Return one half of the requests, which each process reads once."""
    logging.disable(logging.WARNING)
    return _files.enter_context(request_table(records_of(traffic, folder, mooncake, tune=tune), 0.0))


_files = ExitStack()  # of the tables


def policy_of(name: str, seed: int) -> Policy:
    """Return a new policy."""
    return (
        Affinity(LoadSettings(seed=seed)) if name == "affinity" else bare("learned" if name == "events" else name, seed)
    )


def play(
    folder: Path, mooncake: Path | None, tune: bool, world: World, names: Sequence[str], task: Task
) -> dict[str, dict[str, float]]:
    """Return the figures of each policy."""
    members = MEMBERS[task.pool]
    calibration = load_calibration(_H100)
    pool = [
        ReplicaSpec(
            f"{one.value}-{number}",
            one,
            config,
            _H100,
            kv_blocks=int(world.kv * EngineParameters.of(calibration, one, config).kv_blocks),
        )
        for number, (one, config) in enumerate(members)
    ]
    requests = arrived(table_of(task.traffic, folder, mooncake, tune), task)
    figures = {}
    for name in names:
        began_s = time.process_time()
        policy = Gateways(
            [policy_of(name, task.seed + number) for number in range(world.gateways)],
            task.seed,
            events=name == "events",
            restart_every=len(requests) // (len(pool) + 1) if world.restart else 0,
        )
        played = replay(pool, requests, policy, seed=task.seed, warmup=len(requests) // 5)
        figures[name] = {
            "mean": float(played.e2e_s.mean()),
            "ttft": float(played.ttft_s.mean()),
            "errors": played.errors,
            "cpu_s": time.process_time() - began_s,
        }
    return figures


def report(results: dict[Task, dict[str, dict[str, float]]]) -> None:
    """Print a row for each cell, and the means over cells."""
    names = list(next(iter(results.values())))
    bars = [name for name in BASELINES if name in names]
    heads = ["traffic", "pool", "load/s", "best, s", *names, "±", *(f"TTFT {name}, s" for name in names)]
    print("|", " | ".join(heads), "|")
    print("|" + "---|" * len(heads))
    above: list[str] = []
    ratios: dict[str, list[float]] = {name: [] for name in names}
    for cell in dict.fromkeys((task.traffic, task.pool, task.load) for task in results):
        runs = [figures for task, figures in results.items() if task[:3] == cell]
        means = {name: fmean(run[name]["mean"] for run in runs) for name in names}
        best_s = min((means[name] for name in bars), default=means[names[0]])
        for name in names:
            ratios[name].append(means[name] / best_s)
        cells = [f"{means[name] / best_s:.3f}" for name in names]
        ttfts = [f"{fmean(run[name]['ttft'] for run in runs):.2f}" for name in names]
        _, half = of_runs([run[names[-1]]["mean"] / min(run[name]["mean"] for name in bars or names) for run in runs])
        print(
            "|",
            " | ".join([*map(str, cell), f"{best_s:.2f}", *cells, "" if math.isnan(half) else f"{half:.3f}", *ttfts]),
            "|",
        )
        if means[names[-1]] > MOST * best_s:
            above.append(" ".join(map(str, cell)))
    print("\n| over all cells |", " | ".join(names), "|\n|" + "---|" * (len(names) + 1))
    print("| geometric mean |", " | ".join(f"{geometric_mean(ratios[name]):.3f}" for name in names), "|")
    print("| worst |", " | ".join(f"{max(ratios[name], default=inf):.3f}" for name in names), "|")
    print(f"\n{len(above)} of {len(ratios[names[-1]])} cells above {MOST}: {'; '.join(above) or 'none'}.")


def main() -> None:
    """Play all runs on all cores, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("agents", type=Path, help="folder of sessions")
    parser.add_argument("--mooncake", type=Path, help="Mooncake trace")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--tune", action="store_true", help="the half that is for development")
    parser.add_argument("--pool", action="append", choices=list(MEMBERS))
    parser.add_argument("--load", action="append", type=float)
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--kv", type=float, default=1.0, help="share of the KV cache")
    parser.add_argument("--restart", action="store_true", help="each engine restarts once")
    parser.add_argument("--policy", action="append", choices=POLICIES)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    names = given.policy or POLICIES
    world = World(given.gateways, given.kv, given.restart)
    tasks = [
        Task(traffic, pool, load, seed)
        for traffic, pool in product(TRAFFIC[: 1 if given.mooncake is None else 2], given.pool or MEMBERS)
        for load in given.load or LOADS
        for seed in range(given.seeds)
    ]
    work = partial(play, given.agents, given.mooncake, given.tune, world, names)
    with all_cores(work, given.jobs, "playing") as run_all:
        results = dict(zip(tasks, run_all(tasks), strict=True))
    report(results)
    if given.json is not None:
        rows = [{**task._asdict(), "figures": figures} for task, figures in results.items()]
        given.json.write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
