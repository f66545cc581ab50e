"""Where speculation pays, and where it costs: `python -m benchmarks.routing.crossing FOLDER [--seeds N]`.

Two replicas of Llama-3.1-8B on an L40S, both without speculation, both with EAGLE-3 (k=5, at every load), or one of
each, get the same recorded requests at the same rates (see `benchmarks.routing` for FOLDER). Each prompt is sent once.
Each entry is the mean time to finish in seconds, over all seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Final

import numpy as np

from backends.speculation import Method
from benchmarks.routing.ground import Ground, OnGround, bare, once
from benchmarks.table import head, row
from lab.parallel import all_cores
from lab.simulation.replica_spec import ReplicaSpec
from lab.simulation.simulate import replay

CALIBRATION: Final = "llama-3.1-8b-l40s"
RATES: Final = (1.0, 4.0, 8.0, 16.0, 24.0, 32.0)
_KINDS: Final = {"plain": (Method.BASELINE, {}), "head": (Method.EAGLE3, {"num_speculative_tokens": 5})}
FLEETS: Final = {
    "two without speculation": (("plain", "plain"), "least_loaded"),
    "two with EAGLE-3": (("head", "head"), "least_loaded"),
    "one of each, `least_loaded`": (("plain", "head"), "least_loaded"),
    "one of each, `learned`": (("plain", "head"), "learned"),
}


def play(ground: Ground, run: tuple[float, int]) -> list[float]:
    """Return the mean time to finish of each fleet at a rate."""
    rate, seed = run
    warmup, counted = (once(part, "even", Random(seed)) for part in (ground.others, ground.requests))
    at_s = np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate, len(warmup) + len(counted)))
    requests = [replace(one, arrived_s=at) for one, at in zip(warmup + counted, at_s.tolist(), strict=True)]
    means = []
    for names, policy in FLEETS.values():
        pool = [ReplicaSpec(f"{name}-{at}", *_KINDS[name], CALIBRATION) for at, name in enumerate(names)]
        played = replay(pool, requests, bare(policy, seed), seed=seed, warmup=len(warmup))
        means.append(float(played.e2e_s.mean()))
    return means


def report(means: Sequence[Sequence[float]]) -> None:
    """Print a row for each fleet."""
    print(head("fleet", *(f"{rate:g}/s" for rate in RATES)))
    for fleet, of_fleet in zip(FLEETS, zip(*means, strict=True), strict=True):
        print(row(fleet, *(f"{mean:.2f}" for mean in of_fleet)))


def main() -> None:
    """Play all runs on all cores, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the recordings")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    runs = [(rate, seed) for rate in RATES for seed in range(arguments.seeds)]
    with all_cores(OnGround(play, arguments.folder), label="playing") as play_all:
        played = play_all(runs)
    of_rate = [[one for (at, _), one in zip(runs, played, strict=True) if at == rate] for rate in RATES]
    report([[fmean(each) for each in zip(*ones, strict=True)] for ones in of_rate])


if __name__ == "__main__":
    main()
