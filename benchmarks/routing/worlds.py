"""Compare fleets over worlds of what is not known: `python -m benchmarks.routing.worlds FOLDER [--azure TRACE.csv.gz]`.

Which fleet is best depends on what differs between installations, and what no published table has for yours. So each
world draws it (`World`), and all fleets get the same arrivals of recorded requests (see `benchmarks.routing` for
FOLDER). The regret of a fleet in a world is how much longer its requests take in the mean than with the best fleet of
that world. Nothing that a policy or a schedule was fitted to is reported, and no prompt is
recognized when it comes again.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Final, TypeVar

import numpy as np

from backends.calibration.batch_schedule import with_ranges
from backends.calibration.load import load_calibration
from backends.speculation import Method
from benchmarks.routing.ground import COUNTED, POOLS, WARMUP, WORKLOADS, Ground, OnGround, bare, throughput
from benchmarks.routing.ground import options as ground_options
from benchmarks.routing.runs import of_runs
from benchmarks.table import head, row
from lab.parallel import all_cores
from lab.simulation.drafts import best_schedule, mean_context_tokens, tokens_per_step
from lab.simulation.replica_spec import ReplicaSpec
from lab.simulation.request import ReplayRequest
from lab.simulation.simulate import replay

Result = TypeVar("Result")

POOL_OF: Final = {"8B": "b/n/s/e", "70B": "70B"}
LOOKUP_S: Final = 0.04e-3, 3.0e-3
"""Seconds that a step with n-gram or suffix drafting takes longer, from what the calibration has to the least that was
measured on an H100 with vLLM 0.24 (2.9 to 6 ms, of a step that is not scheduled asynchronously); 0.87 ms on an A100."""
HEAD_PASS: Final = 0.7, 1.6
"""Factor on the time of a head's pass."""
HEAD_FITS: Final = 0.7
"""Share of the worlds whose head fits its target; in the others a share of 0.2 to 0.9 of its drafts stays accepted."""
POOR_HEAD: Final = 0.2, 0.9
LOADS: Final = 0.1, 1.2
"""Of what one replica each of baseline, n-gram, suffix and EAGLE-3 carry with full batches."""
BEHIND: Final = 1.02
LONGEST_K: Final = 8

FLEETS: Final[Mapping[str, str]] = {
    "4 baseline": "bbbb",
    "4 n-gram": "nnnn",
    "4 suffix": "ssss",
    "4 EAGLE-3": "EEEE",
    "one each of four": "bnsE",
    "2 suffix, 2 EAGLE-3": "ssEE",
    "1 suffix, 3 EAGLE-3": "sEEE",
}
"""The method of each replica; EAGLE-3 has the k by batch size that is best in the world."""
ADAPTIVE: Final[Mapping[str, str]] = {"4 EAGLE-3, adaptive": "AAAA", "2 suffix, 2 adaptive": "ssAA"}
"""EAGLE-3 that verifies as many drafts as vLLM finds worth it, profiled with the context of the traffic."""
MIXED: Final = ("one each of four", "2 suffix, 2 EAGLE-3", "2 suffix, 2 adaptive", "1 suffix, 3 EAGLE-3")
ALIKE: Final = tuple(name for name in [*FLEETS, *ADAPTIVE] if name not in MIXED)
POLICIES: Final = ("least_loaded", "learned")


@dataclass(frozen=True, slots=True)
class World:
    """What is not known, as drawn from a seed."""

    seed: int
    target: str
    lookup_s: float  # by which a step with n-gram or suffix drafting is longer
    head_pass: float  # factor on the time of a head's pass
    head_fit: float  # share of the head's accepted drafts that stay accepted
    mix: tuple[float, ...]  # shares of chat, code, maths and summaries
    load: float
    arrivals: str

    @classmethod
    def drawn(cls, seed: int) -> World:
        """Return the world of a seed."""
        rng = np.random.default_rng([seed, 82])
        fit = 1.0 if rng.random() < HEAD_FITS else float(rng.uniform(*POOR_HEAD))
        return cls(
            seed,
            str(rng.choice(list(POOL_OF))),
            float(np.exp(rng.uniform(*np.log(LOOKUP_S)))),
            float(np.exp(rng.uniform(*np.log(HEAD_PASS)))),
            fit,
            tuple(float(share) for share in rng.dirichlet(np.ones(len(WORKLOADS)))),
            float(rng.uniform(*LOADS)),
            "azure" if seed % 2 else "poisson",
        )

    def calibration(self, folder: Path) -> str:
        """Write the calibration of this world into a folder, and return its path."""
        known = load_calibration(POOLS[POOL_OF[self.target]][0])
        document: dict[str, Any] = known.model_dump(mode="json", exclude={"name", "methods_from"}, exclude_none=True)
        for method in (Method.NGRAM, Method.SUFFIX):
            document["methods"][method]["drafting"] |= {"verify_share": 0.0, "base_s": self.lookup_s}
        drafting = document["methods"][Method.EAGLE3]["drafting"]
        for name in ("per_pass_s", "per_request_s"):
            drafting[name] *= self.head_pass
        path = folder / f"world-{self.seed}.yaml"
        path.write_text(json.dumps(document), encoding="utf-8")
        return str(path)

    def requests(self, known: Mapping[str, Sequence[ReplayRequest]], count: int, rng: Random) -> list[ReplayRequest]:
        """Return random requests of the mix, of which none is recognized."""
        drawn = rng.choices(list(WORKLOADS.values()), self.mix, k=count)
        chosen = (rng.choice(known[workload]) for workload in drawn)
        requests = [replace(one, features=replace(one.features, template="")) for one in chosen]
        return requests if self.head_fit == 1.0 else [thinned(one, self.head_fit) for one in requests]


def thinned(request: ReplayRequest, share: float) -> ReplayRequest:
    """Return a request of which EAGLE-3's recorded drafts are accepted less often, each token with that probability."""
    recorded = np.asarray(request.acceptance[Method.EAGLE3.value])
    rng = np.random.default_rng([len(recorded), request.prompt_tokens, round(1000 * share)])
    recorded = 1 + np.minimum(recorded - 1, rng.geometric(1.0 - share, len(recorded)) - 1)
    scripts = {key: script for key, script in request._scripts.items() if key[0] != Method.EAGLE3.value}
    features = replace(request.features, temperature=0.0)
    return replace(request, features=features, acceptance={Method.EAGLE3.value: recorded.tolist()}, _scripts=scripts)


def specs_of(calibration: str, others: Sequence[ReplayRequest], pool: str) -> dict[str, ReplicaSpec]:
    """Return a replica of each letter of the fleets; what is set goes by requests that are not reported."""
    specs = {
        letter: ReplicaSpec(letter, method, config, calibration)
        for letter, (method, config) in zip("bnsE", POOLS[pool][1], strict=True)
    }
    config = {**specs["E"].config, "enable_adaptive_verification": True}
    adaptive = replace(specs["E"], config=config, profile_context=round(mean_context_tokens(others)))
    return specs | {"E": scheduled(specs["E"], others), "A": adaptive}


def scheduled(spec: ReplicaSpec, requests: Sequence[ReplayRequest]) -> ReplicaSpec:
    """Return a replica that drafts as many tokens as are best for the batch size on some requests."""
    calibration, config = load_calibration(spec.calibration), {**spec.config, "num_speculative_tokens": LONGEST_K}
    per_step = tokens_per_step(calibration, spec.method, config, requests)
    batch, context = calibration.scheduler.max_num_seqs, mean_context_tokens(requests)
    ranges = best_schedule(calibration, spec.method, config, per_step, context, batch)
    return replace(spec, config=with_ranges(config, ranges) if ranges else config)


def timed(ground: Ground, world: World, rate: float, requests: Sequence[ReplayRequest]) -> list[ReplayRequest]:
    rng = np.random.default_rng(world.seed)
    gaps_s = rng.exponential(1.0, len(requests))
    if world.arrivals == "azure" and ground.gaps_s is not None:
        start = int(rng.integers(len(ground.gaps_s) - len(requests)))
        gaps_s = ground.gaps_s[start : start + len(requests)]
        gaps_s = gaps_s / gaps_s.mean()
    at_s = np.cumsum(gaps_s) / rate
    return [replace(one, arrived_s=at) for one, at in zip(requests, at_s.tolist(), strict=True)]


@dataclass(frozen=True, slots=True)
class Scene:
    """A world with a replica of each letter of `FLEETS`, and arrivals that all fleets get."""

    world: World
    specs: Mapping[str, ReplicaSpec]
    rate: float
    requests: Sequence[ReplayRequest]
    rng: Random  # for further requests

    def mean_s(self, letters: str, policy: str) -> float:
        """Return the mean seconds to finish on a fleet."""
        members = [replace(self.specs[letter], name=f"{letter}{at}") for at, letter in enumerate(letters)]
        seed = self.world.seed
        return float(replay(members, self.requests, bare(policy, seed), seed=seed, warmup=WARMUP).e2e_s.mean())


@contextmanager
def staged(ground: Ground, seed: int) -> Iterator[Scene]:
    """Draw a world, whose calibration is kept until the block ends."""
    world, rng = World.drawn(seed), Random(seed)
    with tempfile.TemporaryDirectory(prefix="worlds-") as folder:
        calibration = world.calibration(Path(folder))
        others = world.requests(ground.others, COUNTED, rng)
        specs = specs_of(calibration, others, POOL_OF[world.target])
        chosen = world.requests(ground.requests, WARMUP + COUNTED, rng)
        rate = world.load * throughput([specs[letter] for letter in "bnsE"], chosen[WARMUP:])
        yield Scene(world, specs, rate, timed(ground, world, rate, chosen), rng)


def play(ground: Ground, seed: int) -> dict[str, float]:
    """Play a world on every fleet with every policy; return mean seconds to finish, by `FLEET: POLICY`."""
    fleets = {**FLEETS, **ADAPTIVE}
    with staged(ground, seed) as scene:
        return {
            f"{name}: {policy}": scene.mean_s(fleet, policy) for name, fleet in fleets.items() for policy in POLICIES
        }


def report(worlds: Sequence[Mapping[str, float]]) -> None:
    """Print the regret of each fleet, and what routing is worth in the mixed ones."""
    middle_s = math.sqrt(math.prod(LOOKUP_S))
    halves = f"lookup under {1e3 * middle_s:.2f} ms", "over"
    print(head("fleet", "policy", "regret, mean", "worst tenth", *halves, "best or within 1%"))
    is_long = np.array([World.drawn(seed).lookup_s > middle_s for seed in range(len(worlds))])
    best = np.array([min(world.values()) for world in worlds])
    for name in worlds[0]:
        regret = np.array([world[name] for world in worlds]) / best - 1.0
        figures = [regret.mean(), np.quantile(regret, 0.9), regret[~is_long].mean(), regret[is_long].mean()]
        cells = [f"{each:.1%}" for each in figures]
        print(row(*name.split(": "), *cells, f"{(regret < 0.01).sum()} of {len(worlds)}"))
    print("\n" + head("routed", "over", "time", "sooner in", "later by over 2% in"))
    for fleet in MIXED:
        alike = [min(world[f"{one}: {policy}"] for one in ALIKE for policy in POLICIES) for world in worlds]
        for what, others in (
            ("the same, `least_loaded`", [world[f"{fleet}: least_loaded"] for world in worlds]),
            ("the best of one method", alike),
            ("4 baseline", [world["4 baseline: least_loaded"] for world in worlds]),
        ):
            ratios = [world[f"{fleet}: learned"] / other for world, other in zip(worlds, others, strict=True)]
            mean, half = of_runs(ratios)
            reach = "" if math.isnan(half) else f" ±{mean * half:.3f}"
            sooner, later = sum(one < 1.0 for one in ratios), sum(one > BEHIND for one in ratios)
            print(row(fleet, what, f"{mean:.3f}{reach}", f"{sooner} of {len(worlds)}", later))


def options(about: str | None, worlds: int) -> argparse.ArgumentParser:
    """Return the options of a program that plays so many worlds."""
    parser = ground_options(about)
    parser.add_argument("--worlds", type=int, default=worlds)
    return parser


def play_worlds(chosen: argparse.Namespace, play: Callable[[Ground, int], Result]) -> list[Result]:
    """Play all worlds on all cores."""
    with all_cores(OnGround(play, chosen.folder, chosen.azure, chosen.tune), label="playing") as play_all:
        return list(play_all(range(chosen.worlds)))


if __name__ == "__main__":
    report(play_worlds(options(__doc__, 80).parse_args(), play))
