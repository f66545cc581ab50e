"""Measure how much the figures depend on the requests: `python -m benchmarks.routing.request_sets FOLDER [--pool P]`.

`benchmarks.routing` draws 2,000 requests from some 350 recorded ones, and its intervals are over seeds. Here each half
of the recordings is reported in turn. The intervals are over requests: bootstrap samples of the recorded requests of
each kind (Efron, "Bootstrap Methods: Another Look at the Jackknife", Annals of Statistics 7(1), 1979), the same for all
policies. They leave out that other requests would also cause another load.

`learned` recognises a prompt that is drawn again. `on unseen` is `learned` trained on the other half, which learns
nothing more: every request is new to it.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean

import numpy as np
import numpy.typing as npt

from benchmarks.routing.ground import COUNTED, POOLS, WARMUP, WORKLOADS, Ground, Task, drawn, ground_of, pool_of, timed
from lab.replay.request import ReplayRequest
from lab.replay.simulate import Replayed, learned_rows, replay, set_learned
from policies.balancing.least_loaded import LeastLoaded
from policies.balancing.load_policy import LoadSettings
from policies.learned.policy import Learned, LearnedSettings
from policies.policy import Policy
from policies.roles import Work
from policies.statistics import Row

Floats = npt.NDArray[np.float64]

MIXES = ("even", "code", "chat")
LOADS = (0.02, 0.5, 0.95)
SAMPLES = 400
"""Bootstrap samples."""


class Settled(Learned):
    """`learned` that fits its models to what it has at the start, and to nothing later."""

    name = "settled"
    _fitted_backends = -1

    def maintenance(self) -> Work | None:
        """Return a fit only if there are new backends, as at the start."""
        count = len(self.predictor.backend_models)
        if count == self._fitted_backends:
            return None
        self._fitted_backends = count
        return super().maintenance()


@dataclass(frozen=True, slots=True)
class Run:
    """The times of one run, fastest first, and which recorded request each belongs to."""

    e2e_s: Floats
    request: npt.NDArray[np.int64]

    @classmethod
    def of(cls, played: Replayed, requests: Sequence[ReplayRequest], index: Mapping[int, int]) -> Run:
        """Return a run; `index` numbers the recorded requests by the identity of their recording."""
        order = np.argsort(played.e2e_s)
        numbers = np.array([index[id(requests[number].acceptance)] for number in played.number])
        return cls(played.e2e_s[order], numbers[order])

    def mean(self, weights: Floats) -> float:
        """Return the mean time if each recorded request has a weight."""
        return float(np.average(self.e2e_s, weights=weights[self.request]))

    def p99(self, weights: Floats) -> float:
        """Return the 99th percentile."""
        share = np.cumsum(weights[self.request])
        return float(self.e2e_s[min(len(share) - 1, int(np.searchsorted(share, 0.99 * share[-1])))])


def trained(ground: Ground, pool: str) -> list[Row]:
    """Return what `learned` learns from the other half at medium load."""
    requests = drawn(ground.others, "even", WARMUP + COUNTED, Random(99))
    policy = Learned(LearnedSettings(seed=99))
    replay(pool_of(pool), timed(ground, Task(pool, "even", 0.5, "poisson", 99), requests), policy)
    return learned_rows(policy)


def runs_of(ground: Ground, pool: str, seeds: int) -> dict[str, list[Run]]:
    """Return the runs of each policy, in the same order of mix, load and seed."""
    rows = trained(ground, pool)
    index = {id(one.acceptance): number for number, one in enumerate(recorded(ground))}
    runs: dict[str, list[Run]] = defaultdict(list)
    for task in [Task(pool, mix, load, "poisson", seed) for mix in MIXES for load in LOADS for seed in range(seeds)]:
        requests = timed(ground, task, drawn(ground.requests, task.mix, WARMUP + COUNTED, Random(task.seed)))
        settled = Settled(LearnedSettings(seed=task.seed))
        set_learned(settled, rows, 0.0)
        policies: dict[str, Policy | None] = {
            "least_loaded": LeastLoaded(LoadSettings(seed=task.seed)),
            "learned": Learned(LearnedSettings(seed=task.seed)),
            "on unseen": settled,
            "oracle": None,
        }
        for name, policy in policies.items():
            played = replay(pool_of(pool), requests, policy, seed=task.seed, warmup=WARMUP)
            runs[name].append(Run.of(played, requests, index))
    return runs


def recorded(ground: Ground) -> list[ReplayRequest]:
    """Return the reported requests, by workload."""
    return [one for workload in WORKLOADS.values() for one in ground.requests[workload]]


def samples(ground: Ground) -> list[Floats]:
    """Return weights of the recorded requests: first all the same, then bootstrap samples within each workload."""
    rng = np.random.default_rng(0)
    counts = [len(ground.requests[workload]) for workload in WORKLOADS.values()]
    equal = [np.ones(sum(counts))]
    return equal + [
        np.concatenate([rng.multinomial(count, np.full(count, 1 / count)).astype(float) for count in counts])
        for _ in range(SAMPLES)
    ]


def report(runs: Mapping[str, Sequence[Run]], weights: Sequence[Floats]) -> None:
    """Print ratios to `least_loaded` and to `oracle`: geometric means over runs with 95% intervals over requests."""

    def ratio(name: str, to: str, figure: Callable[[Run, Floats], float]) -> str:
        logs = [
            fmean(
                math.log(figure(one, sample) / figure(other, sample))
                for one, other in zip(runs[name], runs[to], strict=True)
            )
            for sample in weights
        ]
        low, high = np.exp(np.percentile(logs[1:], [2.5, 97.5]))
        return f"{math.exp(logs[0]):.3f} [{low:.3f}, {high:.3f}]"

    print("\n| policy | mean | 99th percentile | 99th percentile over that of `oracle` |\n|---|---|---|---|")
    for name in ("learned", "on unseen", "oracle"):
        ratios = (
            ratio(name, "least_loaded", Run.mean),
            ratio(name, "least_loaded", Run.p99),
            ratio(name, "oracle", Run.p99),
        )
        print(f"| {name} | {' | '.join(ratios)} |")
    slowest = [run.request[run.e2e_s >= np.percentile(run.e2e_s, 99)] for run in runs["learned"]]
    distinct = fmean(len(set(numbers.tolist())) for numbers in slowest)
    counts = Counter(int(number) for numbers in slowest for number in numbers)
    share = sum(count for _, count in counts.most_common(5)) / counts.total()
    print(
        f"\nThe slowest percent of a run are {distinct:.1f} recorded requests on average; "
        f"five hold {share:.0%} of these places over all runs."
    )


def main() -> None:
    """Report each half in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the recordings")
    parser.add_argument("--pool", choices=list(POOLS), default="b/n/s/e")
    parser.add_argument("--seeds", type=int, default=4)
    arguments = parser.parse_args()
    for tune in (False, True):
        ground = ground_of(arguments.folder, None, tune)
        print(f"\n**{'Even' if tune else 'Odd'} positions**, {len(recorded(ground))} requests")
        report(runs_of(ground, arguments.pool, arguments.seeds), samples(ground))


if __name__ == "__main__":
    main()
