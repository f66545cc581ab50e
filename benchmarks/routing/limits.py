"""Short requests beside long ones: `python -m benchmarks.routing.limits FOLDER [--runs N]`.

FOLDER is that of `benchmarks.routing`. Chat requests, of which a share is replaced by prompts of 3,000 to 8,000 tokens,
on pools whose EAGLE-3 heads have a limit of 2,048 tokens: one request beyond it makes the drafts of its whole batch
dummies. Entries are the mean time of the short requests, their 99th percentile, and the mean time of the long ones,
each over `least_loaded` that knows nothing of limits, as geometric means over runs on the same arrivals; then the
interval of the first, by Student's t.
"""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

from backends.drafter_limit import DrafterLimit
from backends.speculation import Method
from benchmarks.routing.ground import WARMUP, Ground, capacity, ground_of, pool_of
from benchmarks.routing.runs import of_runs
from benchmarks.table import head, row
from lab.simulation.replica_spec import ReplicaSpec
from lab.simulation.request import ReplayRequest
from lab.simulation.simulate import replay
from policies.balancing.least_loaded import LeastLoaded
from policies.balancing.lmetric import LMetric
from policies.learned.policy import Learned
from policies.learned.settings import LearnedSettings
from policies.load_policy import LoadSettings
from policies.policy import Policy
from policies.rules.policy import Thresholds, ThresholdSettings

POOLS = ("4 EAGLE-3", "2s/2e", "b/n/s/e")
SHARES = (0.005, 0.01, 0.02, 0.05)
LOADS = (0.25, 0.5, 0.75)


LIMIT = DrafterLimit(2048)
"""Of EAGLE-3's head."""
SHORT, LONG = 700, (3000, 8000)
"""Longest prompt of a short request, and bounds of the prompts of a long one: their logarithms are uniform."""
REQUESTS = 4000


class Unknowing(LeastLoaded):
    """`least_loaded` to whose candidates all requests may go."""

    prices_limits = True


MAKERS: dict[str, Callable[[int], Policy]] = {
    "unknowing": lambda seed: Unknowing(LoadSettings(seed=seed)),
    "least_loaded": lambda seed: LeastLoaded(LoadSettings(seed=seed)),
    "lmetric": lambda seed: LMetric(LoadSettings(seed=seed)),
    "thresholds": lambda seed: Thresholds(ThresholdSettings(seed=seed)),
    "learned": lambda seed: Learned(LearnedSettings(seed=seed)),
}


class Run(NamedTuple):
    """Requests on replicas, of which the first do not count."""

    specs: list[ReplicaSpec]
    requests: list[ReplayRequest]
    seed: int


def beside_long(ground: Ground, pool: str, share: float, load: float, seed: int) -> Run:
    """Return short chat requests of which a share is replaced by long ones, on replicas whose heads have a limit.

    A long one has an answer of the recordings, but no text: its acceptance is drawn.
    """
    rng, chosen = Random(seed), []
    chat = [one for one in ground.requests["chat"] if one.prompt_tokens <= SHORT]
    for _ in range(WARMUP + REQUESTS):
        one = rng.choice(chat)
        if rng.random() < share:
            tokens = round(math.exp(rng.uniform(*map(math.log, LONG))))
            features = replace(one.features, prompt_tokens=tokens)
            one = replace(one, features=features, prompt_tokens=tokens, acceptance={}, text=None, _scripts={})
        chosen.append(one)
    gaps = np.random.default_rng(seed).exponential(1.0, len(chosen))
    at_s = np.cumsum(gaps / load) / capacity(ground, pool, "chat")
    requests = [replace(one, arrived_s=at) for one, at in zip(chosen, at_s.tolist(), strict=True)]
    limits = {Method.EAGLE3: LIMIT}
    return Run([replace(one, drafter_limit=limits.get(one.method)) for one in pool_of(pool)], requests, seed)


def figures(run: Run, policy: Policy) -> list[float]:
    """Return the mean and 99th percentile of the short requests, and the mean of the long ones, in seconds."""
    played = replay(run.specs, run.requests, policy, seed=run.seed, warmup=WARMUP)
    is_short = np.array([run.requests[number].prompt_tokens <= SHORT for number in played.number])
    short, long = played.e2e_s[is_short], played.e2e_s[~is_short]
    return [float(short.mean()), float(np.percentile(short, 99)), float(long.mean()) if len(long) else math.nan]


def main() -> None:
    """Play all runs, and print a row for each pool, share and load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--pool", action="append", choices=POOLS, help="only this pool; may be repeated")
    parser.add_argument("--share", action="append", type=float, help="only this share of long requests")
    parser.add_argument("--load", action="append", type=float, help="only this load")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    names = [name for name in MAKERS if name != "unknowing"]
    print(head("pool", "long", "load", *names))
    ground = ground_of(given.folder, None, False)
    for pool, share, load in product(given.pool or POOLS, given.share or SHARES, given.load or LOADS):
        seconds: dict[str, list[list[float]]] = {name: [] for name in MAKERS}
        for seed in range(given.runs):
            run = beside_long(ground, pool, share, load, seed)
            for name, each in seconds.items():
                each.append(figures(run, MAKERS[name](seed)))
        cells = []
        for name in names:
            ratios = np.array(seconds[name]) / np.array(seconds["unknowing"])
            short, tail, long = np.exp(np.log(ratios).mean(axis=0))
            _, half = of_runs(ratios[:, 0].tolist())
            cells.append(f"{short:.2f} {tail:.2f} {long:.2f} ±{half:.2f}")
        print(row(pool, f"{share:.1%}", f"{load:.0%}", *cells), flush=True)


if __name__ == "__main__":
    main()
