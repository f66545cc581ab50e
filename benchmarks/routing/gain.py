"""Score the guardrail's estimate of the gain against the truth: `python -m benchmarks.routing.gain FOLDER [--cell C]`.

The truth is the mean time of the same arrivals wholly under a policy, over that wholly under `least_loaded`, as the
mean over some runs. In other runs the guardrail switches between both (see `benchmarks.routing` for FOLDER). `bias` is
the mean estimate over the truth; `covered` the share of runs whose 95% interval holds the truth at the end; `frozen`
the share of runs in which the policy is frozen, and the median time until then.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean, median, stdev
from typing import Any, Final

from backends.backend import Candidate
from benchmarks.routing.ground import Ground, OnGround, Task, bare, capacity, drawn, pool_of, timed
from benchmarks.routing.learning import Learning, learning_of, teach
from benchmarks.table import head, row
from lab.parallel import all_cores
from lab.simulation.request import ReplayRequest
from lab.simulation.simulate import replay
from policies.balancing.least_loaded import LeastLoaded
from policies.build import Guarded
from policies.features.request import RequestFeatures
from policies.learned.policy import Learned
from policies.learned.settings import LearnedSettings
from policies.load_policy import LoadSettings
from policies.policy import Decision, GuardrailSettings, Policy, policies

TRUTH_SEEDS: Final = 1000
"""Seed of the first run that shows the truth."""
LONGEST: Final = 250_000
NEVER: Final = 100.0
"""Tolerance with which nothing is frozen."""
OFF: Final = GuardrailSettings(share=0)


class Careless(LeastLoaded):
    """`least_loaded`, but for a share of requests that goes to the first replica, which does not speculate: a harm."""

    name = "careless"
    share = 0.25

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate], rng: Random | None = None) -> Decision:
        """Choose a candidate."""
        if self.rng.random() < self.share:
            return Decision(candidates[0].name, self.name, "first", self.share)
        return super().choose(request, candidates, rng)


@dataclass(frozen=True, slots=True)
class Cell:
    """A policy in a situation.

    Parameters
    ----------
    load
        Share of the pool's capacity, or requests per second if above 1.
    share, block_s, tolerance
        Settings of the guardrail. Nothing is frozen by default, so that each run has the same evidence.
    blocks
        Length of a run.
    """

    pool: str
    mix: str
    load: float
    policy: str
    block_s: float = 32.0
    runs: int = 100
    share: float = 0.25
    blocks: int = 24
    tolerance: float = NEVER


def make(ground: Ground, cell: Cell, seed: int, guardrail: GuardrailSettings, now_s: float = 0.0) -> Policy:
    """Return a new policy, with a guardrail if that has a share; what is trained is so at `now_s`."""
    if cell.policy == "learned":
        learned = Learned(LearnedSettings(seed=seed, guardrail=guardrail))
        teach(learned, trained(ground, cell.pool), now_s)
        return learned
    kind: Any = Careless if cell.policy == "careless" else policies()[cell.policy]
    settings = LoadSettings if kind is Careless else kind.Settings
    policy: Policy = kind(settings(seed=seed, guardrail=guardrail))
    return Guarded(policy) if guardrail.share else policy


def trained(ground: Ground, pool: str) -> Learning:
    """Return what `learned` learns from the other requests at medium load."""
    if pool not in ground.warm:
        requests = drawn(ground.others, "even", 6000, Random(99))
        policy = Learned(LearnedSettings(seed=99, guardrail=OFF))
        replay(pool_of(pool), timed(ground, Task(pool, "even", 0.5, "poisson", 99), requests), policy)
        ground.warm[pool] = learning_of(policy)
    return ground.warm[pool]


def arrivals(ground: Ground, cell: Cell, seed: int, seconds: float) -> list[ReplayRequest]:
    """Return the requests of a run."""
    rate = capacity(ground, cell.pool, cell.mix)
    load = cell.load if cell.load <= 1.0 else cell.load / rate
    count = min(LONGEST, int(seconds * load * rate))
    task = Task(cell.pool, cell.mix, load, "poisson", seed)
    return timed(ground, task, drawn(ground.requests, cell.mix, count, Random(seed)))


def truth(ground: Ground, cell: Cell, seed: int) -> float:
    """Return the mean time under the policy over that under `least_loaded`, of the same arrivals."""
    requests = arrivals(ground, cell, TRUTH_SEEDS + seed, 400.0)
    means = [
        replay(pool_of(cell.pool), requests, policy, seed=seed, warmup=len(requests) // 10).e2e_s.mean()
        for policy in (make(ground, cell, seed, OFF), bare("least_loaded", seed))
    ]
    return float(means[0] / means[1])


def watch(ground: Ground, cell: Cell, seed: int) -> tuple[tuple[float, float, float], float]:
    """Play a run; return the ratio that the guardrail shows at its end with its interval, and when it froze."""
    settings = GuardrailSettings(share=cell.share, block_s=cell.block_s, tolerance=cell.tolerance)
    began_s = 1e6 * (seed + 1)  # other places of the blocks in each run
    policy = make(ground, cell, seed, settings, began_s)
    assert isinstance(policy, Guarded | Learned)
    requests = arrivals(ground, cell, seed, cell.blocks * cell.block_s)
    for each in requests:
        each.arrived_s += began_s
    coming, frozen_s = iter(requests), math.inf

    def choose_and_look(request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        nonlocal frozen_s
        decision, now_s = choose(request, candidates), next(coming).arrived_s
        if policy.guardrail.freezes:
            frozen_s = min(frozen_s, now_s - began_s)
        return decision

    choose, policy.choose = policy.choose, choose_and_look  # type: ignore[method-assign]
    replay(pool_of(cell.pool), requests, policy, seed=seed)
    return policy.guardrail.comparison(0.95)[:3], frozen_s


def row_of(cell: Cell, truths: Sequence[float], seen: Sequence[tuple[tuple[float, float, float], float]]) -> str:
    """Return a row of the table."""
    true, error = fmean(truths), stdev(truths) / math.sqrt(len(truths))
    ends = [end for end, _ in seen if not math.isnan(end[0])]
    covered, bias, width = math.nan, math.nan, math.nan
    if ends:
        covered = fmean(low <= true <= high for _, low, high in ends)
        bias = fmean(ratio for ratio, _, _ in ends) / true - 1.0
        width = fmean(math.log(high / low) / 2 for _, low, high in ends)
    frozen = [each for _, each in seen]
    share = "" if cell.tolerance >= NEVER else f"{fmean(not math.isinf(each) for each in frozen):.0%}"
    when = "" if math.isinf(median(frozen)) else f"{median(frozen) / 60:.0f} min"
    load = f"{cell.load:.0%}" if cell.load <= 1.0 else f"{cell.load:.0f}/s"
    guardrail = f"{cell.share:g} of {cell.block_s:.0f} s, {cell.blocks}"
    figures = f"{true:.3f} ±{2 * error:.3f}", f"{bias:+.1%}", f"±{width:.1%}", len(ends), f"{covered:.0%}"
    return row(cell.pool, cell.mix, load, cell.policy, guardrail, len(seen), *figures, share, when)


COLUMNS: Final = (
    *("pool", "mix", "load", "policy", "share, blocks", "runs", "truth", "bias", "interval", "shown", "covered"),
    *("frozen", "after"),
)
CELLS: dict[str, Sequence[Cell]] = {
    "light": [Cell("b/n/s/e", "even", 10, policy) for policy in ("power_of_two", "thresholds", "careless")],
    "half": [
        *(Cell("b/n/s/e", "even", 0.5, policy, runs=60) for policy in ("power_of_two", "thresholds")),
        Cell("2s/2e", "code", 0.5, "power_of_two", runs=60),
        Cell("mixture of experts", "code", 0.5, "thresholds", 64, 60),
        Cell("mixture of experts", "drifting", 0.5, "careless", 64, 60),
    ],
    "full": [
        Cell("b/n/s/e", "even", 0.9, "thresholds", 48, 30),
        Cell("2s/2e", "even", 0.9, "power_of_two", 48, 30),
    ],
    "learned": [
        Cell("b/n/s/e", "even", 10, "learned", runs=40),
        Cell("b/n/s/e", "even", 0.5, "learned", runs=14),
        Cell("2s/2e", "even", 0.5, "learned", runs=14),
        Cell("mixture of experts", "even", 0.9, "learned", 96, 8),
    ],
    "default": [Cell("b/n/s/e", "even", 10, "careless", 60, 20, 0.02, 240, 0.02)],
}


def _run(ground: Ground, job: tuple[Callable[..., object], Cell, int]) -> Any:
    function, cell, seed = job
    return function(ground, cell, seed)


def main() -> None:
    """Play all runs of some cells, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cells", choices=list(CELLS), action="append", help="only these; may be repeated")
    parser.add_argument("--runs", type=int, help="runs of each cell")
    parser.add_argument("--truths", type=int, default=8, help="runs that show the truth of a cell")
    arguments = parser.parse_args()
    print(head(*COLUMNS), flush=True)
    with all_cores(OnGround(_run, arguments.folder)) as run_all:
        for cell in [cell for name in arguments.cells or CELLS for cell in CELLS[name]]:
            truths = run_all([(truth, cell, seed) for seed in range(arguments.truths)])
            seen = run_all([(watch, cell, seed) for seed in range(arguments.runs or cell.runs)])
            print(row_of(cell, truths, seen), flush=True)


if __name__ == "__main__":
    main()
