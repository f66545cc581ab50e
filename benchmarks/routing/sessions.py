"""Routing to warm prefix caches: `python -m benchmarks.routing.sessions AGENTS [--seeds N]`.

AGENTS is a folder of sessions of coding agents (kv-cache-tester, not part of the project), played in a closed loop: the
next request comes its think time after the last answer. Requests beyond the target's context (131,072 tokens) are left
out. One part of the sessions (`draw`) is reported, with `--tune` the other.

Loads are requests per second that arrive if answers take no longer than recorded. The first fifth of the requests are
warm-up. `best` is the mean time to finish with the best of `least_loaded`, prefix affinity alone and `lmetric`;
`learned` is that over it, with the 95% interval over seeds.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from backends.backend import Candidate
from benchmarks.routing.ground import POOLS, REPORTED, TUNING, bare
from benchmarks.routing.runs import of_runs
from benchmarks.table import head, row
from lab.parallel import all_cores
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
_H100, (_B, _N, _S, _E) = POOLS["b/n/s/e"]
MEMBERS = {"4e": (_E,) * 4, "4s": (_S,) * 4, "4b": (_B,) * 4, "b/n/s/e": (_B, _N, _S, _E), "2s/2e": (_S, _S, _E, _E)}
LOADS = (0.5, 2.0, 4.0)
COPIES = 10
BASELINES = ("least_loaded", "affinity", "lmetric")


class Affinity(LMetric):
    """Prefix affinity alone: the longest expected prefix, and among equals the least loaded."""

    name = "affinity"

    def _scores(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[tuple[float, float, int]]:
        return [(new + 1e-6 * count, new, count) for _, new, count in super()._scores(request, candidates)]


class Task(NamedTuple):
    """One run of arrivals, played with every policy; `load` in requests per second."""

    pool: str
    load: float
    seed: int


Figures = dict[str, float]
"""Mean seconds to finish, by policy."""


def short(path: Path) -> list[TraceRecord]:
    """Return the requests of a trace that fit into the context."""
    return [one for one in read_trace([path]) if one.prompt_tokens + (one.output_tokens or 0) <= CONTEXT]


@cache
def table_of(folder: Path, tune: bool) -> RequestTable:
    """Return one half of the sessions, which each process reads once."""
    logging.disable(logging.WARNING)
    part = TUNING if tune else REPORTED
    paths = [path for path in sorted(folder.glob("*.json.gz")) if draw(path.name) % 2 == part]
    return _files.enter_context(request_table([one for path in paths for one in short(path)], 0.0))


_files = ExitStack()  # of the tables


def policy_of(name: str, seed: int) -> Policy:
    """Return a new policy."""
    return Affinity(LoadSettings(seed=seed)) if name == "affinity" else bare(name, seed)


def play(folder: Path, tune: bool, task: Task) -> Figures:
    """Return the figures of each policy."""
    pool = [ReplicaSpec(f"{one.value}-{n}", one, config, _H100) for n, (one, config) in enumerate(MEMBERS[task.pool])]
    requests = table_of(folder, tune).in_sessions(task.load, 1.0, COPIES, task.seed)
    figures = {}
    for name in (*BASELINES, "learned"):
        policy = policy_of(name, task.seed)
        played = replay(pool, requests, policy, seed=task.seed, warmup=len(requests) // 5)
        figures[name] = float(played.e2e_s.mean())
    return figures


def report(results: dict[Task, Figures]) -> None:
    """Print a row for each pool and load."""
    print(head("pool", "requests/s", "best, s", "learned", "±"))
    for pool, load in dict.fromkeys((task.pool, task.load) for task in results):
        runs = [figures for task, figures in results.items() if task[:2] == (pool, load)]
        best_s = min(fmean(run[name] for run in runs) for name in BASELINES)
        _, half = of_runs([run["learned"] / min(run[name] for name in BASELINES) for run in runs])
        ratio = fmean(run["learned"] for run in runs) / best_s
        print(row(pool, load, f"{best_s:.1f}", f"{ratio:.3f}", f"{half:.3f}"))


def main() -> None:
    """Play all runs on all cores, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("agents", type=Path, help="folder of sessions")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--tune", action="store_true", help="the half that is for development")
    parser.add_argument("--pool", action="append", choices=list(MEMBERS))
    parser.add_argument("--load", action="append", type=float)
    given = parser.parse_args()
    tasks = [Task(*each) for each in product(given.pool or MEMBERS, given.load or LOADS, range(given.seeds))]
    with all_cores(partial(play, given.agents, given.tune), label="playing") as run_all:
        report(dict(zip(tasks, run_all(tasks), strict=True)))


if __name__ == "__main__":
    main()
