"""Measure the value of knowing future arrivals: `python -m benchmarks.routing.lookahead FOLDER [--pool P] [--seeds N]`.

`benchmarks.routing` compares `learned` with an oracle that knows each request's length and acceptance, but not the
future. Here the oracle also knows the next arrivals, and simulates them for each replica that it may choose (a rollout:
Bertsekas, Tsitsiklis and Wu, "Rollout algorithms for combinatorial optimization", Journal of Heuristics 3, 1997). The
less this improves, the closer the choice of least total delay is to an optimal assignment.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from backends.backend import Candidate
from backends.simulator.engine.fleet import Replica
from benchmarks.routing.ground import COUNTED, POOLS, WARMUP, Ground, Task, drawn, ground_of, pool_of, timed
from benchmarks.routing.play import makers
from lab.replay.request import ReplayRequest
from lab.replay.simulate import ReplicaSpec, replay
from policies.features.request import RequestFeatures
from policies.learned.models.prior import expected_step
from policies.learned.shadow_drafting import steps_of
from policies.policy import Decision, Outcome, Policy, PolicySettings

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

AHEAD = (1, 20, 100)
LOADS = (0.02, 0.5, 0.95)
MIXES = ("even", "code")
_MAX_RUNNING = 1200  # requests on a replica


@numba.njit(cache=True)
def _drain_s(steps: Floats, cost_s: Floats, base_s: float, count: int) -> float:
    """Return the total remaining time of all requests if no others arrive."""
    total_s = last = 0.0
    step_s = base_s + cost_s[:count].sum()
    for index, request in enumerate(np.argsort(steps[:count])):
        total_s += step_s * (steps[request] - last) * (count - index)
        last = steps[request]
        step_s -= cost_s[request]
    return total_s


@numba.njit(cache=True)
def _advance(steps: Floats, cost_s: Floats, base_s: float, count: int, left_s: float) -> tuple[int, float]:
    """Advance a replica; return the number of remaining requests, and the time that all requests spent there."""
    spent_s = 0.0
    while count > 0 and left_s > 0:
        step_s = base_s + cost_s[:count].sum()
        soonest = steps[:count].min()
        passes_s = min(left_s, soonest * step_s)
        spent_s += count * passes_s
        left_s -= passes_s
        kept = 0
        for request in range(count):
            after = steps[request] - passes_s / step_s
            if after > 1e-9:
                steps[kept], cost_s[kept] = after, cost_s[request]
                kept += 1
        count = kept
    return count, spent_s


@numba.njit(cache=True)
def _rollout_s(
    steps: Floats, cost_s: Floats, base_s: Floats, counts: Ints, coming: Floats, gaps_s: Floats, first: int
) -> float:
    """Return the total time if the first arrival goes to `first`, and later ones where they delay the total least.

    Parameters
    ----------
    coming
        Steps, seconds per step and seconds of prefill of each request on each replica; shape (requests, replicas, 3).
    """
    steps, cost_s, counts = steps.copy(), cost_s.copy(), counts.copy()
    total_s = 0.0
    for number in range(len(coming)):
        chosen = first
        if number > 0:
            least_s = np.inf
            for replica in range(len(base_s)):
                counts[replica], spent_s = _advance(
                    steps[replica], cost_s[replica], base_s[replica], counts[replica], gaps_s[number]
                )
                total_s += spent_s
                count = counts[replica]
                before_s = _drain_s(steps[replica], cost_s[replica], base_s[replica], count)
                steps[replica, count], cost_s[replica, count] = coming[number, replica, 0], coming[number, replica, 1]
                after_s = _drain_s(steps[replica], cost_s[replica], base_s[replica], count + 1)
                delay_s = after_s - before_s + (count + 1) * coming[number, replica, 2]
                if delay_s < least_s:
                    least_s, chosen = delay_s, replica
        count = counts[chosen]
        total_s += (count + 1) * coming[number, chosen, 2]
        steps[chosen, count], cost_s[chosen, count] = coming[number, chosen, 0], coming[number, chosen, 1]
        counts[chosen] += 1
    for replica in range(len(base_s)):
        total_s += _drain_s(steps[replica], cost_s[replica], base_s[replica], counts[replica])
    return total_s


class Lookahead(Policy):
    """Oracle that knows the whole trace and simulates the next `ahead` arrivals; with 1 it knows only this request."""

    name = "lookahead"

    def __init__(self, requests: Sequence[ReplayRequest], pool: Sequence[ReplicaSpec], ahead: int) -> None:
        super().__init__(PolicySettings())
        self._requests = requests
        self._pool = pool
        self._ahead = ahead
        self._next = 0
        self._costs_of: dict[tuple[int, int], tuple[float, float, float]] = {}
        self._running: list[dict[int, tuple[float, float]]] = [{} for _ in pool]
        k = [int(spec.config.get("num_speculative_tokens", 0)) for spec in pool]
        self._costs = [expected_step(spec.calibration, spec.method, k) for spec, k in zip(pool, k, strict=True)]
        self._k = k

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Choose by rollout."""
        replicas: list[Any] = list(candidates)
        number, count = self._next, len(replicas)
        self._next += 1
        steps, cost_s = np.zeros((count, _MAX_RUNNING)), np.zeros((count, _MAX_RUNNING))
        counts = np.array([len(running) for running in self._running])
        for index, running in enumerate(self._running):
            replica: Replica = replicas[index]
            for row, (last, cost) in enumerate(running.values()):
                steps[index, row], cost_s[index, row] = max(1.0, last - replica.steps), cost
        coming = self._requests[number : number + self._ahead]
        known = np.array([[self._takes(number + row, index) for index in range(count)] for row in range(len(coming))])
        gaps_s = np.diff([arrival.arrived_s for arrival in coming], prepend=coming[0].arrived_s)
        base_s = np.array([cost.base_s for cost in self._costs])
        delays_s = [_rollout_s(steps, cost_s, base_s, counts, known, gaps_s, index) for index in range(count)]
        best = int(np.argmin(delays_s))
        taken, cost, _ = self._takes(number, best)
        self._running[best][number] = replicas[best].steps + taken, cost
        return Decision(replicas[best].name, self.name, "least_delay", memo=(best, number))

    def observe(self, outcome: Outcome) -> None:
        """Remove a request that has ended."""
        memo = outcome.decision.memo
        assert isinstance(memo, tuple)
        del self._running[memo[0]][memo[1]]

    def _takes(self, number: int, index: int) -> tuple[float, float, float]:
        """Return a request's steps, the seconds that it adds to a step, and its prefill seconds, on one replica."""
        known = self._costs_of.get((number, index))
        if known is None:
            request, spec, cost = self._requests[number], self._pool[index], self._costs[index]
            script = request.script(spec.method, self._k[index], spec.config)
            assert script is not None  # recorded
            known = self._costs_of[number, index] = (
                float(steps_of(script.emitted)),
                cost.per_request_s + cost.per_context_token_s * (request.prompt_tokens + request.output_tokens / 2),
                cost.per_prompt_token_s * request.prompt_tokens,
            )
        return known


def cell(ground: Ground, task: Task) -> dict[int, tuple[float, float]]:
    """Return mean and 99th percentile of the end-to-end time over those of `least_loaded`, by lookahead."""
    pool = pool_of(task.pool)
    requests = timed(ground, task, drawn(ground.requests, task.mix, WARMUP + COUNTED, Random(task.seed)))

    def figures(policy: Policy | None) -> tuple[float, float]:
        e2e_s = replay(pool, requests, policy, seed=task.seed, warmup=WARMUP).e2e_s
        return float(e2e_s.mean()), float(np.percentile(e2e_s, 99))

    mean_s, p99_s = figures(makers(ground, task)["least_loaded"]())
    by_ahead = {ahead: figures(Lookahead(requests, pool, ahead)) for ahead in AHEAD}
    return {ahead: (mean / mean_s, p99 / p99_s) for ahead, (mean, p99) in by_ahead.items()}


def main() -> None:
    """Play all settings one after another, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the recordings")
    parser.add_argument("--pool", choices=list(POOLS), default="b/n/s/e")
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    ground = ground_of(arguments.folder, None, tune=False)
    print("| mix | load | " + " | ".join(f"knows the next {ahead}: mean, p99" for ahead in AHEAD) + " |")
    print("|---" * (2 + len(AHEAD)) + "|")
    every: dict[int, list[tuple[float, float]]] = {ahead: [] for ahead in AHEAD}
    for mix in MIXES:
        for load in LOADS:
            cells = [cell(ground, Task(arguments.pool, mix, load, "poisson", seed)) for seed in range(arguments.seeds)]
            texts = []
            for ahead in AHEAD:
                every[ahead] += [ratios[ahead] for ratios in cells]
                texts.append(_both([ratios[ahead] for ratios in cells]))
            print(f"| {mix} | {load:g} | " + " | ".join(texts) + " |", flush=True)
    print("| all | | " + " | ".join(_both(every[ahead]) for ahead in AHEAD) + " |")


def _both(ratios: Sequence[tuple[float, float]]) -> str:
    means = [math.exp(fmean(math.log(ratio[index]) for ratio in ratios)) for index in range(2)]
    return f"{means[0]:.4f}, {means[1]:.4f}"


if __name__ == "__main__":
    main()
