"""Short requests beside long ones: `python -m benchmarks.routing.limits FOLDER [--runs N] [--json FILE]`.

FOLDER is that of `benchmarks.routing`. Chat requests, of which a share is replaced by prompts of 3,000 to 8,000 tokens,
on pools whose EAGLE-3 heads have a limit of 2,048 tokens: one request beyond it makes the drafts of its whole batch
dummies. Entries are the mean time of the short requests, their 99th percentile, and the mean time of the long ones,
each over `least_loaded` that knows nothing of limits, as geometric means over runs on the same arrivals; then the
interval of the first, by Student's t.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.routing.runs import of_runs
from benchmarks.routing.scenes import SHORT, Run, Stage
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


def figures(run: Run, policy: Policy) -> list[float]:
    """Return the mean and 99th percentile of the short requests, and the mean of the long ones, in seconds."""
    played = replay(run.specs, run.requests, policy, seed=run.seed, warmup=run.warmup)
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
    parser.add_argument("--policy", action="append", choices=list(MAKERS), help="only this policy and the reference")
    parser.add_argument("--json", type=Path, help="file to write all figures to")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    names = [name for name in MAKERS if name != "unknowing" and name in (given.policy or MAKERS)]
    print("| pool | long | load | " + " | ".join(names) + " |")
    print("|---" * (3 + len(names)) + "|")
    rows = []
    with ExitStack() as files:
        stage = Stage.of(given.folder, None, files)
        for pool, share, load in product(given.pool or POOLS, given.share or SHARES, given.load or LOADS):
            seconds: dict[str, list[list[float]]] = {name: [] for name in ("unknowing", *names)}
            for number in range(given.runs):
                run = stage.beside_long(pool, share, load, number)
                for name, each in seconds.items():
                    each.append(figures(run, MAKERS[name](number)))
            rows.append({"pool": pool, "share": share, "load": load, **seconds})
            reference = np.array(seconds["unknowing"])
            cells = []
            for name in names:
                ratios = np.array(seconds[name]) / reference
                short, tail, long = np.exp(np.log(ratios).mean(axis=0))
                _, half = of_runs(ratios[:, 0].tolist())
                cells.append(f"{short:.2f} {tail:.2f} {long:.2f} ±{half:.2f}")
            print(f"| {pool} | {share:.1%} | {load:.0%} | {' | '.join(cells)} |", flush=True)
            print(f"\r{len(rows)}", end="", file=sys.stderr, flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
