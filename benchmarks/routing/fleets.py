"""Compare fleets on the same hardware: `python -m benchmarks.routing.fleets FOLDER [--azure TRACE.csv.gz] [--seeds N]`.

Four replicas each, alike or mixed, get the same arrivals at the same absolute rates: from a quarter of what `b/n/s/e`
carries with full batches to 130% of it (see `benchmarks.routing` for FOLDER and the mixes of traffic). EAGLE-3 drafts 3
tokens or, where the fleet says "schedule", as many as are best for the batch size on the requests that are not
reported. Each entry is the mean time to finish in seconds, over all seeds; beside it, how much longer that is than with
the best fleet and policy at the same rate, with the paired 95% interval over seeds.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import NamedTuple

from backends.calibration.batch_schedule import SCHEDULE_KEY
from backends.calibration.calibration import load_calibration
from benchmarks.routing.ground import COUNTED, POOLS, WARMUP, Ground, OnGround, Task, bare, drawn, timed
from benchmarks.routing.runs import of_runs
from lab.parallel import all_cores
from lab.plan.drafts import best_schedule, mean_context_tokens, tokens_per_step
from lab.simulation.request import ReplayRequest
from lab.simulation.simulate import ReplicaSpec, replay

REFERENCE = {"8B": "b/n/s/e", "70B": "70B"}
"""The pool whose capacity the rates are shares of, by target."""

LONGEST_K = 8
LOADS = (0.25, 0.5, 0.75, 0.95, 1.1, 1.3)
MIXES = ("even", "code")

FLEETS: Mapping[str, str] = {
    "4 baseline": "bbbb",
    "4 n-gram": "nnnn",
    "4 suffix": "ssss",
    "4 EAGLE-3": "eeee",
    "4 EAGLE-3, schedule": "EEEE",
    "b/n/s/e": "bnse",
    "2 suffix, 2 EAGLE-3": "ssee",
    "2 suffix, 2 EAGLE-3, schedule": "ssEE",
}
"""The method of each replica; `E` is EAGLE-3 with a schedule."""

POLICIES = ("least_loaded", "learned")


class Run(NamedTuple):
    """One run of arrivals."""

    target: str
    mix: str
    load: float
    seed: int


Means = dict[tuple[str, str], float]
"""Mean time to finish in seconds, by fleet and policy."""


def specs_of(ground: Ground, target: str, mix: str, fleet: str) -> list[ReplicaSpec]:
    """Return the replicas of a fleet; schedules are made for the mix, on the requests that are not reported."""
    calibration, members = POOLS[REFERENCE[target]]
    by_letter = dict(zip("bnse", members, strict=True))
    others = drawn(ground.others, mix, COUNTED, Random(0))
    specs = []
    for number, letter in enumerate(FLEETS[fleet]):
        method, config = by_letter[letter.lower()]
        spec = ReplicaSpec(f"{method.value}-{number}", method, config, calibration)
        specs.append(scheduled(spec, others) if letter.isupper() else spec)
    return specs


def scheduled(spec: ReplicaSpec, requests: Sequence[ReplayRequest]) -> ReplicaSpec:
    """Return a replica that drafts as many tokens as are best for the batch size on some requests."""
    calibration, config = load_calibration(spec.calibration), {**spec.config, "num_speculative_tokens": LONGEST_K}
    per_step = tokens_per_step(calibration, spec.method, config, requests)
    batch, context = calibration.scheduler.max_num_seqs, mean_context_tokens(requests)
    ranges = best_schedule(calibration, spec.method, config, per_step, context, batch)
    if not ranges:
        return spec
    config |= {"num_speculative_tokens": max(k for *_, k in ranges), SCHEDULE_KEY: [list(one) for one in ranges]}
    return replace(spec, config=config)


def play(ground: Ground, run: Run) -> Means:
    """Play one run of arrivals on every fleet with every policy."""
    target, mix, load, seed = run
    task = Task(REFERENCE[target], mix, load, "azure" if seed % 2 else "poisson", seed)
    requests = timed(ground, task, drawn(ground.requests, mix, WARMUP + COUNTED, Random(seed)))
    means = {}
    for fleet in FLEETS:
        specs = specs_of(ground, target, mix, fleet)
        for policy in POLICIES:
            played = replay(specs, requests, bare(policy, seed), seed=seed, warmup=WARMUP)
            means[fleet, policy] = float(played.e2e_s.mean())
    return means


def report(results: Mapping[Run, Means]) -> None:
    """Print a table for each target and mix."""
    for target, mix in dict.fromkeys((run.target, run.mix) for run in results):
        runs = {run: means for run, means in results.items() if (run.target, run.mix) == (target, mix)}
        loads = sorted({run.load for run in runs})
        print(f"\n**{target}, {mix}**\n\n| fleet | policy | {' | '.join(f'{load:.0%}' for load in loads)} |")
        print("|---|---" + "|---" * len(loads) + "|")
        rows = list(next(iter(runs.values())))
        columns = [_column([means for run, means in runs.items() if run.load == load], rows) for load in loads]
        for number, (fleet, policy) in enumerate(rows):
            print(f"| {fleet} | {policy} | {' | '.join(column[number] for column in columns)} |")


def _column(runs: Sequence[Means], rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return the entries of one rate."""
    seconds = {row: fmean(means[row] for means in runs) for row in rows}
    best = min(rows, key=seconds.__getitem__)
    entries = []
    for row in rows:
        if row == best:
            entries.append(f"**{seconds[row]:.2f}**")
            continue
        value, half = of_runs([means[row] / means[best] for means in runs])
        reach = "" if math.isnan(half) else f" ±{half:.1%}"
        entries.append(f"{seconds[row]:.2f} ({value - 1.0:+.1%}{reach})")
    return entries


def main() -> None:
    """Play all runs on all cores, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the recordings")
    parser.add_argument("--azure", type=Path, help="trace of which every second seed takes the gaps between arrivals")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--target", action="append", choices=list(REFERENCE), help="only this target; may be repeated")
    parser.add_argument("--tune", action="store_true", help="report the half of the requests that is for development")
    parser.add_argument("--json", type=Path, help="file to write all figures to")
    arguments = parser.parse_args()
    runs = [
        Run(target, mix, load, seed)
        for target in arguments.target or REFERENCE
        for mix in MIXES
        for load in LOADS
        for seed in range(arguments.seeds)
    ]
    with all_cores(OnGround(play, arguments.folder, arguments.azure, arguments.tune), label="playing") as run_all:
        results = dict(zip(runs, run_all(runs), strict=True))
    report(results)
    if arguments.json is not None:
        rows = [
            run._asdict() | {"means": {f"{fleet}: {policy}": mean for (fleet, policy), mean in means.items()}}
            for run, means in results.items()
        ]
        arguments.json.write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
