"""What a race of two replicas would gain: `python -m benchmarks.routing.race FOLDER [--tune] [--seeds N] [--most N]`.

A request is sent to two replicas of different methods, the first whole answer counts, and the other call is cancelled.
The second replica is the policy's choice among those of other methods with at most `--most` requests; without one there
is no race. Pools, loads and recordings are those of `benchmarks.routing`. The policy learns no tokens per step from a
race, because only the faster answer is seen. The loser goes on for up to 50 ms, as a cancelled request does in an
engine. Each figure is the mean time to finish with races over that without, on the same arrivals. The gateway has no
races: decision 0050.
"""

from __future__ import annotations

import argparse
import math
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.routing.ground import COUNTED, WARMUP, Ground, Task, drawn, ground_of, pool_of, prepare, timed
from lab.replay.request import ReplayRequest
from lab.replay.simulate import ReplicaSpec, _Simulation, outcome_of, set_learned
from policies.balancing.least_loaded import LeastLoaded
from policies.balancing.load_policy import LoadSettings
from policies.decision import Outcome
from policies.learned.policy import Learned, LearnedSettings
from policies.policy import Policy

if TYPE_CHECKING:
    from backends.simulator.engine.replica import Completion

LOADS = (0.02, 0.05, 0.1, 0.25, 0.5)
_ABORT_S = 0.05


class Racing(_Simulation):
    """A replay in which requests race."""

    def __init__(
        self, pool: Sequence[ReplicaSpec], requests: Sequence[ReplayRequest], policy: Policy, seed: int, most: int
    ) -> None:
        super().__init__(pool, requests, policy, seed)
        self._most = most
        self._rivals: dict[int, int] = {}
        self.races = self.won_by_second = 0

    def arrive(self, number: int, request: ReplayRequest) -> None:
        """Send a request to the replica that the policy chooses, and to a second one that has little to do."""
        while self._under_way and self._now_s + _ABORT_S < request.arrived_s:
            self._now_s += _ABORT_S
            self._complete(self._fleet.advance(self._now_s))
        super().arrive(number, request)
        first = self._backend[number]
        idle = [
            replica
            for replica in self._replicas
            if replica.method is not self._replicas[first].method and replica.in_flight <= self._most
        ]
        if not idle or self._policy is None:
            return
        first_id = next(reversed(self._under_way))
        features = self._features(request) if self._reads_requests else request.features
        decision = self._policy.choose(features, idle)
        second_id = self._submit(self._indices[decision.backend], request)
        self._under_way[second_id] = number, request, features, decision
        self._rivals |= {first_id: second_id, second_id: first_id}
        self.races += 1

    def _complete(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            if completion.request_id not in self._under_way:
                continue  # it lost within the same step
            rival = self._rivals.pop(completion.request_id, None)
            if rival is None:
                super()._complete([completion])
                continue
            del self._rivals[rival]
            self._fleet.cancel(rival)
            _, _, features, lost = self._under_way.pop(rival)
            self.won_by_second += rival < completion.request_id
            observe, self._observe = self._observe, None
            _, _, _, won = self._under_way[completion.request_id]
            super()._complete([completion])
            self._observe = observe
            if observe is not None:
                method = self._pool[completion.replica].method
                observe(replace(outcome_of(features, won, completion, method), tokens_per_step=None))
                observe(Outcome(features, lost, method, 499, None, None, completion.e2e_s, 0, 0, None))


def play(ground: Ground, task: Task, most: int) -> dict[str, tuple[float, float, float]]:
    """Return for each policy the ratio of the mean times, the share of races and the share won by the second."""
    prepare(ground, task.pool)
    requests = timed(ground, task, drawn(ground.requests, task.mix, WARMUP + COUNTED, Random(task.seed)))

    def made(name: str) -> Policy:
        if name == "least_loaded":
            return LeastLoaded(LoadSettings(seed=task.seed))
        policy = Learned(LearnedSettings(seed=task.seed))
        if name == "learned warm":
            set_learned(policy, ground.warm[task.pool], 0.0)
        return policy

    figures = {}
    for name in ("least_loaded", "learned", "learned warm"):
        means = {}
        for limit in (-1, most):
            simulation = Racing(pool_of(task.pool), requests, made(name), task.seed, limit)
            for number, request in enumerate(requests):
                simulation.arrive(number, request)
            means[limit] = float(simulation.finish(WARMUP).e2e_s.mean())
        figures[name] = (
            means[most] / means[-1],
            simulation.races / len(requests),
            simulation.won_by_second / max(1, simulation.races),
        )
    return figures


_ground: list[Ground] = []


def _start_worker(folder: Path, tune: bool) -> None:
    _ground[:] = [ground_of(folder, None, tune)]


def _play(job: tuple[Task, int]) -> tuple[Task, dict[str, tuple[float, float, float]]]:
    return job[0], play(_ground[0], *job)


def main() -> None:
    """Play all runs on all cores, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the recordings")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--most", type=int, default=2, help="requests that the second replica may have")
    parser.add_argument("--tune", action="store_true", help="report the half of the requests that is for development")
    arguments = parser.parse_args()
    jobs = [
        (Task(pool, mix, load, "poisson", seed), arguments.most)
        for pool in ("b/n/s/e", "2s/2e")
        for load in LOADS
        for mix in ("even", "drifting")
        for seed in range(arguments.seeds)
    ]
    figures = defaultdict(list)
    initial = arguments.folder, arguments.tune
    with get_context("spawn").Pool(len(os.sched_getaffinity(0)), _start_worker, initial) as workers:
        for task, of_policies in workers.imap_unordered(_play, jobs):
            for name, one in of_policies.items():
                figures[task.pool, name, task.load].append(one)
    print("| pool | policy | load | mean time with races | raced | won by the second |")
    print("|---|---|---|---|---|---|")
    for (pool, name, load), ones in sorted(figures.items()):
        logs = np.log([one[0] for one in ones])
        error = logs.std(ddof=1) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
        raced, won = np.mean([one[1:] for one in ones], axis=0)
        print(f"| {pool} | {name} | {load:.0%} | {math.exp(logs.mean()):.3f} ±{error:.3f} | {raced:.0%} | {won:.0%} |")


if __name__ == "__main__":
    main()
