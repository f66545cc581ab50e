"""What one client costs another one: `python -m benchmarks.routing.tenants FOLDER [--tune]`.

FOLDER has the recordings of SpecDecode-Bench, of which one half is reported, with `--tune` the other. Cells are mean
times to finish of the other client's requests.

- **lies**: one chats; the other edits code and declares it as chat, so that it teaches `learned` what is not true of
  chat. Over those if it declares code, by its requests for each of the other's: `as one` if both have one key,
  `by client` with two.
- **bursts**: one sends a request now and then; the other 100 at once, five times as many in all. Over those if what
  a client has in flight beyond its share does not weigh, and the same of the one with the bursts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from statistics import fmean

import numpy as np

from backends.backend import Candidate
from benchmarks.routing.ground import Ground, capacity, ground_of, pool_of
from gateway.routing.keys import Client
from gateway.routing.model import Traffic
from lab.simulation.request import ReplayRequest
from lab.simulation.simulate import replay
from policies.features.request import RequestFeatures
from policies.learned.policy import Learned
from policies.learned.settings import LearnedSettings
from policies.policy import Decision, Outcome

LIES, BURSTS, LOADS, TIMES = ("b/n/s/e", "2s/2e"), ("b/n/s/e", "2s/2e", "4 EAGLE-3"), (0.1, 0.5), (1, 4)
GREEDY, HONEST, BURST = "greedy", "honest", 100


class Weighing(Learned):
    """`learned` in a gateway, which tells it how much of the model its client uses beyond its share."""

    def __init__(self, seed: int) -> None:
        super().__init__(LearnedSettings(seed=seed))
        self.traffic = Traffic()

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Choose with the overuse of the client."""
        client = Client("", id=request.client)
        request.overuse = self.traffic.overuse(client)
        self.traffic.begin(client)
        return super().choose(request, candidates)

    def observe(self, outcome: Outcome) -> None:
        """Count the end."""
        self.traffic.end(Client("", id=outcome.request.client))
        super().observe(outcome)


def sent(request: ReplayRequest, client: str, workload: str) -> ReplayRequest:
    """Return the request of a client that declares its work."""
    return replace(request, features=replace(request.features, workload=workload, template="", client=client))


def means_s(pool: str, policy: Learned, seed: int, requests: Sequence[ReplayRequest], names: list[str]) -> list[float]:
    """Return the mean seconds to finish of the honest client and of the greedy one."""
    played = replay(pool_of(pool), requests, policy, seed=seed, warmup=len(requests) // 5)
    is_honest = np.array([name == HONEST for name in names])[played.number]
    return [float(played.e2e_s[is_honest].mean()), float(played.e2e_s[~is_honest].mean())]


def lied_to_s(ground: Ground, pool: str, load: float, times: int, seed: int, *, lies: bool, keys: bool) -> float:
    """Return the mean of the honest client beside one that edits code."""
    rng, chat = Random(seed), ground.requests["chat"]
    code = rng.choices(ground.requests["code"], k=times * len(chat))
    mixed = [(sent(each, HONEST if keys else "", "chat"), HONEST) for each in chat]
    mixed += [(sent(each, GREEDY if keys else "", "chat" if lies else "code"), GREEDY) for each in code]
    rng.shuffle(mixed)
    gaps_s = np.random.default_rng(seed).exponential(1.0 / load / capacity(ground, pool, "even"), len(mixed))
    at_s = np.cumsum(gaps_s).tolist()
    requests = [replace(each, arrived_s=at) for (each, _), at in zip(mixed, at_s, strict=True)]
    policy = Learned(LearnedSettings(seed=seed))
    return means_s(pool, policy, seed, requests, [name for _, name in mixed])[0]


def beside_bursts_s(ground: Ground, pool: str, load: float, seed: int, *, weighs: bool) -> list[float]:
    """Return the means of both, where one sends bursts."""
    rng, draws = Random(seed), np.random.default_rng(seed)
    every = [request for each in ground.requests.values() for request in each]
    duration_s = 6 * 300 / (load * capacity(ground, pool, "even"))
    calm_s, bursts_s = draws.uniform(0.0, duration_s, 300), np.repeat(draws.uniform(0.0, duration_s, 15), BURST)
    arrivals = sorted([*((at, HONEST) for at in calm_s), *((at, GREEDY) for at in bursts_s)])
    requests = []
    for at, name in arrivals:
        chosen = rng.choice(every)
        features = replace(chosen.features, client=name)
        requests.append(replace(chosen, features=features, arrived_s=float(at)))
    policy = Weighing(seed) if weighs else Learned(LearnedSettings(seed=seed))
    return means_s(pool, policy, seed, requests, [name for _, name in arrivals])


def main() -> None:
    """Print a row for each cell of both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    ground, seeds = ground_of(given.folder, None, given.tune), range(given.seeds)
    print("| lies | load | its requests | as one | by client |\n|---|---|---|---|---|")
    for pool, times, load in product(LIES, TIMES, LOADS):
        cells = []
        for keys in (False, True):
            runs = [
                fmean(lied_to_s(ground, pool, load, times, seed, lies=lies, keys=keys) for seed in seeds)
                for lies in (False, True)
            ]
            cells.append(f"{runs[1] / runs[0]:.3f}")
        print(f"| {pool} | {load} | {times} | {' | '.join(cells)} |", flush=True)
    print("\n| bursts | load | the other | itself |\n|---|---|---|---|")
    for pool, load in product(BURSTS, LOADS):
        plain, weighed = (
            np.mean([beside_bursts_s(ground, pool, load, seed, weighs=on) for seed in seeds], axis=0)
            for on in (False, True)
        )
        print(f"| {pool} | {load} | {weighed[0] / plain[0]:.3f} | {weighed[1] / plain[1]:.3f} |", flush=True)


if __name__ == "__main__":
    main()
