"""Score a day that follows what comparisons find: `python -m benchmarks.routing.following FOLDER [--azure TRACE]`.

In each world (`benchmarks.routing.worlds`; see `benchmarks.routing` for FOLDER), four replicas begin with one method. A
canary tries each other method on one of them, against the other three, by `policies.experiment`; if it is found to be
better, the others follow. Regret is how much longer requests take than with the best fleet of that world: of the fleet
that stays as it is, and of the day, with all comparisons and restarts in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Final

import numpy as np

from benchmarks.routing.compare import ARMS, BEFORE, Cell, Compared
from benchmarks.routing.ground import Ground, bare
from benchmarks.routing.worlds import FLEETS, options, play_worlds, staged, timed
from benchmarks.table import head, row
from gateway.rooms.compare.definition import block_for
from lab.simulation.replica_spec import ReplicaSpec
from lab.simulation.request import ReplayRequest
from lab.simulation.simulate import replay
from policies.experiment.verdict import Stage

METHODS: Final = {"b": "baseline", "s": "suffix", "E": "EAGLE-3"}
ORDER: Final = "Esb"
"""In which a canary tries methods."""
LONGEST_S: Final = 600.0, 1800.0, 7200.0
"""Of a comparison: at first, and while that does not decide; then all stays as it is, as in `gateway canary`."""
RESTART_S: Final = 300.0
"""In which a replica is away, for each engine that is started anew."""
DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class Tried:
    """What a canary came to."""

    is_better: bool
    took_s: float
    lost: float  # mean time meanwhile, over that without it


def try_out(specs: Mapping[str, ReplicaSpec], own: str, other: str, requests: Sequence[ReplayRequest]) -> Tried:
    """Compare one replica of another method with three of the own one."""
    present = [replace(specs[own], name=f"{ARMS[0]}{at}") for at in range(4)]
    members = [*present[:3], replace(specs[other], name=f"{ARMS[1]}3")]
    since_s = np.array([one.arrived_s for one in requests]) - requests[0].arrived_s
    block_s = block_for(float(replay(present, requests[:BEFORE], bare("least_loaded", 0), seed=0).e2e_s.mean()))
    for longest_s in LONGEST_S:
        most = int(np.searchsorted(since_s, longest_s))
        policy = Compared(
            Cell("canary", shape=(3, 1), usual=False), 0, [replace(one) for one in requests[:most]], block_s
        )
        compared = replay(members, policy.requests, policy, seed=0).e2e_s
        policy.look()
        if policy.ended is not None:
            break
    stage, better, took_s = policy.ended or (Stage.OVER, "", longest_s)
    until = since_s[:most] <= took_s
    usual = replay(present, requests[:most], bare("least_loaded", 0), seed=0).e2e_s
    is_better = better == ARMS[1] and stage in (Stage.DECIDED, Stage.HARM)
    return Tried(is_better, took_s, float(compared[until].mean() / usual[until].mean()))


def day(means: Mapping[str, float], start: str, tried: Callable[[str, str], Tried]) -> tuple[float, float, str, int]:
    """Return the mean time of a day, the hours until nothing more is tried, the method at its end, and wrong turns."""
    own, spent_s, total, wrong = start, 0.0, 0.0, 0
    for other in ORDER:
        if other == start:
            continue
        found = tried(own, other)
        restarts = 4 if found.is_better else 2  # of the canary, and then of the others or of it again
        total += means[own * 4] * found.lost * found.took_s + means[own * 3] * restarts * RESTART_S
        spent_s += found.took_s + restarts * RESTART_S
        wrong += found.is_better and means[other * 4] > 1.01 * means[own * 4]
        own = other if found.is_better else own
    return (total + means[own * 4] * (DAY_S - spent_s)) / DAY_S, spent_s / 3600.0, own, wrong


def play(ground: Ground, seed: int) -> dict[str, tuple[float, float, float, str, int]]:
    """Play a world from each start; return both regrets, the hours that it took, the method at the end, wrong turns."""
    with staged(ground, seed) as scene:
        fleets = [*FLEETS.values(), *(letter * 3 for letter in METHODS)]
        balanced = {letters: scene.mean_s(letters, "least_loaded") for letters in fleets}
        best = min(min(balanced[fleet], scene.mean_s(fleet, "learned")) for fleet in FLEETS.values())
        longer = scene.world.requests(ground.requests, int(1.05 * scene.rate * LONGEST_S[-1]), scene.rng)
        arrivals = timed(ground, replace(scene.world, arrivals="poisson"), scene.rate, longer)
        tried = cache(partial(try_out, scene.specs, requests=arrivals))
        found = {}
        for start, name in METHODS.items():
            mean, hours, own, wrong = day(balanced, start, tried)
            found[name] = (balanced[start * 4] / best - 1.0, mean / best - 1.0, hours, own, wrong)
    return found


def report(worlds: Sequence[Mapping[str, tuple[float, float, float, str, int]]]) -> None:
    """Print the regrets by start."""
    print(head("begins with 4", "stays: regret", "worst tenth", "follows: regret", "worst tenth", "hours", "wrong"))
    for start in worlds[0]:
        stays, follows, hours = (np.array([world[start][at] for world in worlds]) for at in range(3))
        shown = [f"{each:.1%}" for part in (stays, follows) for each in (part.mean(), np.quantile(part, 0.9))]
        print(row(start, *shown, f"{np.median(hours):.1f}", sum(world[start][4] for world in worlds)))


if __name__ == "__main__":
    report(play_worlds(options(__doc__, 24).parse_args(), play))
