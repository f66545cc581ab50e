"""Evaluate the default rules on recorded requests: `python -m benchmarks.routing.threshold_rules FOLDER [--tune]`.

Two reports on the reported part of the requests (with `--tune`, on the tuning part): how often
and how nearly a rule names the method that is fastest for its request alone; and the time to finish when requests share
four replicas, one of each method, and slow each other down.
"""

from __future__ import annotations

import argparse
import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean, geometric_mean, quantiles

from backends.backend import EngineLoad
from backends.draft_schedule import DraftSchedule
from backends.speculation import Method
from benchmarks.routing.ground import REPORTED, TUNING
from benchmarks.routing.recorded import ARMS, Recorded, read, step_s
from policies.policy import Policy, policies
from policies.rules.policy import Spill, Thresholds, ThresholdSettings

RATES = (2.0, 10.0, 20.0, 40.0, 60.0, 80.0)
SECONDS = 90.0
Choice = Callable[[Recorded, Sequence["Replica"]], str]


@dataclass(slots=True)
class Replica:
    """A simulated engine in virtual time, which advances all its requests together, step by step."""

    name: str
    method: Method
    num_speculative_tokens: int = 0
    weight: float = 1.0
    in_flight: int = 0
    load: EngineLoad = field(default_factory=EngineLoad)
    now_s: float = 0.0
    steps: int = 0
    tokens: float = 0.0
    context: float = 0.0
    prefill: float = 0.0
    running: list[tuple[int, int, float, Recorded]] = field(default_factory=list)
    """Heap of (last step, order, arrival in seconds, request)."""

    @property
    def draft_schedule(self) -> DraftSchedule:
        """A fixed k."""
        return DraftSchedule(self.num_speculative_tokens)

    def admit(self, order: int, at_s: float, request: Recorded) -> None:
        """Add a request; it joins the batch with the next step, which also does its prefill."""
        work = request.work[self.method]
        if not self.running:
            self.now_s = at_s
        heapq.heappush(self.running, (self.steps + work.steps, order, at_s, request))
        self.in_flight += 1
        self.tokens += work.tokens / work.steps
        self.context += work.context / work.steps
        self.prefill += request.features.prompt_tokens

    def advance(self, until_s: float) -> list[float]:
        """Run steps until one ends after `until_s`; return the end-to-end seconds of the requests that finished."""
        taken = []
        while self.running and self.now_s < until_s:
            self.now_s += step_s(self.method, self.in_flight, self.tokens + self.prefill, self.context)
            self.prefill = 0.0
            self.steps += 1
            while self.running and self.running[0][0] <= self.steps:
                _, _, arrived_s, request = heapq.heappop(self.running)
                work = request.work[self.method]
                self.in_flight -= 1
                self.tokens -= work.tokens / work.steps
                self.context -= work.context / work.steps
                taken.append(self.now_s - arrived_s)
        return taken


def times_to_finish(requests: Sequence[Recorded], rate: float, choose: Choice, seed: int) -> list[float]:
    """Return the end-to-end seconds of each request with Poisson arrivals at `rate` per second for `SECONDS`."""
    rng = Random(seed)
    pool = [Replica(method.value, method) for method in ARMS]
    at_s, order, taken = 0.0, 0, []
    while (at_s := at_s + rng.expovariate(rate)) < SECONDS:
        for replica in pool:
            taken += replica.advance(at_s)
        request = rng.choice(requests)
        chosen = choose(request, pool)
        next(replica for replica in pool if replica.name == chosen).admit(order, at_s, request)
        order += 1
    for replica in pool:
        taken += replica.advance(float("inf"))
    return taken


def by_policy(policy: Policy) -> Choice:
    """Return a choice made by a policy."""
    return lambda request, pool: policy.choose(request.features, pool).backend


def fastest_alone(request: Recorded, pool: Sequence[Replica]) -> str:
    """Return the replica that is fastest for this request on an idle engine, according to the recording."""
    return min(pool, key=lambda replica: request.alone_s(replica.method)).name


def thresholds(slack: float, ratio: float) -> Policy:
    """Return the default rules with a spill bound."""
    return Thresholds(ThresholdSettings(spill=Spill(slack=slack, ratio=ratio), seed=1))


def report_alone(requests: Sequence[Recorded]) -> None:
    """Print how often and how nearly each choice is the fastest for its request alone."""
    idle = [Replica(method.value, method) for method in ARMS]
    rules = thresholds(8, 1.25)
    choices: dict[str, Choice] = {f"always {method}": _always(method) for method in ARMS}
    choices |= {"default rules": by_policy(rules), "fastest (oracle)": fastest_alone}
    print(f"{'alone':18} {'fastest of all':>14} {'speedup over baseline (geometric mean)':>40}")
    for name, choose in choices.items():
        chosen = [(request, Method(choose(request, idle))) for request in requests]
        hits = fmean(method == fastest_alone(request, idle) for request, method in chosen)
        gain = geometric_mean(request.alone_s(Method.BASELINE) / request.alone_s(method) for request, method in chosen)
        print(f"{name:18} {hits:14.1%} {gain:40.3f}")
    used = Counter(rules.choose(request.features, idle).reason for request in requests)
    print("rules used:", ", ".join(f"{rule} {count}" for rule, count in used.most_common()), "\n")


def _always(method: Method) -> Choice:
    return lambda request, pool: method.value


def _built(policy: type[Policy]) -> Choice:
    seeded = "seed" in policy.Settings.model_fields
    return by_policy(policy(policy.Settings.model_validate({"seed": 1} if seeded else {})))


def _rules(slack: float, ratio: float) -> Choice:
    return by_policy(thresholds(slack, ratio))


def report_shared(requests: Sequence[Recorded], choices: dict[str, Callable[[], Choice]], seeds: Sequence[int]) -> None:
    """Print the mean and 99th percentile of the end-to-end time at each rate, relative to `least_loaded`."""
    print(
        f"{'shared: mean s':18}",
        *(f"{rate:>7g}/s" for rate in RATES),
        f"{'mean':>8}",
        f"{'p99':>8}",
        "(to least_loaded)",
    )
    base: list[tuple[float, float]] = []
    for name, build in choices.items():
        cells = []
        for rate in RATES:
            taken = [time for seed in seeds for time in times_to_finish(requests, rate, build(), seed)]
            cells.append((fmean(taken), quantiles(taken, n=100)[98]))
        base = base or cells
        ratios = [
            geometric_mean(cell[which] / first[which] for cell, first in zip(cells, base, strict=True))
            for which in (0, 1)
        ]
        print(f"{name:18}", *(f"{mean:9.2f}" for mean, _ in cells), *(f"{ratio:8.3f}" for ratio in ratios))
    print()


def main() -> None:
    """Print both reports, without and with declared workloads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the recordings")
    parser.add_argument("--tune", action="store_true", help="use the tuning part, and try several spill bounds")
    arguments = parser.parse_args()
    by_name = policies()
    for declare in (False, True):
        half = read(arguments.folder, TUNING if arguments.tune else REPORTED, declare=declare)
        print(f"== {len(half)} requests, workload {'declared' if declare else 'not declared'}")
        report_alone(half)
        choices: dict[str, Callable[[], Choice]] = {
            name: partial(_built, by_name[name]) for name in ("least_loaded", "power_of_two", "round_robin")
        }
        choices["fastest alone"] = lambda: fastest_alone
        bounds = [(float("inf"), 1.0), (Spill().slack, Spill().ratio)]
        if arguments.tune:
            bounds += [(slack, ratio) for slack in (0.0, 2.0, 4.0, 8.0, 16.0) for ratio in (1.0, 1.25, 1.5, 2.0)]
        for slack, ratio in bounds:
            choices[f"rules {slack:g}+{ratio:g}x"] = partial(_rules, slack, ratio)
        report_shared(half, choices, seeds=(1, 2) if not arguments.tune else (1,))


if __name__ == "__main__":
    main()
