"""What a client that lies about its work costs another one: `python -m benchmarks.routing.liar FOLDER [--tune]`.

FOLDER has the recordings of SpecDecode-Bench, of which one half is reported, with `--tune` the other. The client chats;
the liar edits code and declares it as chat, so that it teaches `learned` what is not true of chat. Cells are mean
times to finish of the other client's requests over those if the liar declares code, by requests of the liar for each
of its: `as one` if both have one key, `by client` with two.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from statistics import fmean

import numpy as np

from benchmarks.routing.ground import Ground, capacity, ground_of, pool_of
from lab.replay.request import ReplayRequest
from lab.replay.simulate import replay
from policies.learned.policy import Learned, LearnedSettings

POOLS, LOADS, TIMES = ("b/n/s/e", "2s/2e"), (0.1, 0.5), (1, 4)


def mean_s(ground: Ground, pool: str, load: float, times: int, seed: int, *, lies: bool, keys: bool) -> float:
    """Return the mean seconds to finish of the requests of the client that does not lie."""

    def sent(request: ReplayRequest, client: str, workload: str) -> tuple[ReplayRequest, bool]:
        features = replace(request.features, workload=workload, template="", client=client if keys else "")
        return replace(request, features=features), client == "honest"

    rng, requests = Random(seed), ground.requests
    code = rng.choices(requests["code"], k=times * len(requests["chat"]))
    mixed = [sent(each, "honest", "chat") for each in requests["chat"]]
    mixed += [sent(each, "liar", "chat" if lies else "code") for each in code]
    rng.shuffle(mixed)
    rate = load * capacity(ground, pool, "even")
    at_s = np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate, len(mixed))).tolist()
    arrived = [replace(each, arrived_s=at) for (each, _), at in zip(mixed, at_s, strict=True)]
    policy = Learned(LearnedSettings(seed=seed))
    played = replay(pool_of(pool), arrived, policy, seed=seed, warmup=len(mixed) // 5)
    is_honest = np.array([honest for _, honest in mixed])[played.number]
    return float(played.e2e_s[is_honest].mean())


def main() -> None:
    """Print a row for each cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    ground = ground_of(given.folder, None, given.tune)
    print("| pool | load | requests of the liar | as one | by client |\n|---|---|---|---|---|")
    for pool, times, load in product(POOLS, TIMES, LOADS):
        cells = []
        for keys in (False, True):
            honest, lying = (
                fmean(mean_s(ground, pool, load, times, seed, lies=lies, keys=keys) for seed in range(given.seeds))
                for lies in (False, True)
            )
            cells.append(f"{lying / honest:.3f}")
        print(f"| {pool} | {load} | {times} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
