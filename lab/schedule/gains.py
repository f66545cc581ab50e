"""Gain of other speculative configs at each load, by simulation on requests that were not used to choose them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from lab.options.policy import policy_reference, with_seed
from lab.replay.simulate import Floats, Replayed, ReplicaSpec, replay
from lab.replay.table import RequestTable
from lab.statistics import Interval, of_replications
from policies.build import build
from policies.policy import PolicySettings

LOADS: Final = (0.25, 0.5, 0.75, 0.95, 1.1, 1.3)
"""Shares of the pool's capacity."""
REQUESTS_PER_REPLICA: Final = 1000
"""Requests to simulate: fewer are repeated, since a pool takes a while to fill up."""
_WARMUP: Final = 0.1
"""Share of the requests that are simulated but not counted, so that the pool is not idle."""
_AT_ONCE: Final = 0.9
"""Share of the output whose time counts for the capacity: the last few requests run alone."""


class Run(NamedTuple):
    """One simulation: the index of a pool, requests per second (None: all at once), a seed, and a replication.

    Replication 0 is the requests as they are, others are traffic like them (`RequestTable.resampled`).
    """

    pool: int
    rate: float | None
    seed: int
    replication: int = 0


PlayAll = Callable[[Sequence[Run]], Sequence[Replayed]]
"""Simulates in parallel, and returns the results in the same order."""


@dataclass(frozen=True, slots=True)
class Runner:
    """Simulates pools on the same requests; sent once to each process."""

    pools: tuple[tuple[ReplicaSpec, ...], ...]
    requests: RequestTable
    policy: str
    settings: PolicySettings

    @property
    def rounds(self) -> int:
        """How often the requests are played one after another."""
        return math.ceil(REQUESTS_PER_REPLICA * len(self.pools[0]) / len(self.requests))

    def __call__(self, run: Run) -> Replayed:
        """Simulate; with the same seed, every pool gets the same arrivals and draws."""
        played = self.requests.resampled(run.replication) if run.replication else self.requests
        count = self.rounds * len(played)
        if run.rate is None:
            policy, times_s = build("least_loaded", policy_reference("least_loaded", None).settings), np.zeros(count)
        else:
            policy = build(self.policy, with_seed(self.settings, run.seed))
            times_s = _at_rate(played.order.arrived_s, run.rate, self.rounds)
        requests = [
            replace(one, arrived_s=at_s) for one, at_s in zip(list(played) * self.rounds, times_s.tolist(), strict=True)
        ]
        warmup = 0 if run.rate is None else int(_WARMUP * count)
        return replay(self.pools[run.pool], requests, policy, seed=run.seed, warmup=warmup)


def _at_rate(arrived_s: Floats, rate: float, rounds: int) -> Floats:
    """Return times scaled to a rate of requests per second, and repeated."""
    count, span_s = len(arrived_s), float(arrived_s[-1] - arrived_s[0])
    once_s = (arrived_s - arrived_s[0]) * (count / rate / span_s if span_s > 0 else 0.0)
    return np.concatenate([once_s + number * count / rate for number in range(rounds)])


@dataclass(frozen=True, slots=True)
class LoadGain:
    """The gain at one load."""

    load: float  # share of the capacity of the present pool
    rate: float  # requests per second
    seconds: tuple[float, ...]  # mean time to finish in each pool
    # Share of the first pool's time that each of the others saves; that of the second with its 95% interval.
    gains: tuple[Interval, ...]


def capacity(play_all: PlayAll) -> float:
    """Return the requests per second of the first pool with full batches, when all requests come at once."""
    [played] = play_all([Run(0, None, 0)])
    order = np.argsort(played.e2e_s)
    done = np.cumsum(played.output_tokens[order]) / played.output_tokens.sum()
    ended = int(np.searchsorted(done, _AT_ONCE))
    return float(_AT_ONCE * len(order) / played.e2e_s[order][ended])


def gains(
    play_all: PlayAll, pools: int, per_s: float, seed: int, replications: int, loads: Sequence[float] = LOADS
) -> list[LoadGain]:
    """Return the gains of the other pools over the first at each load."""
    runs = {
        (load, pool, number): Run(pool, load * per_s, seed + number, number)
        for load in loads
        for number in range(replications + 1)
        for pool in range(pools if number == 0 else 2)
    }
    mean_s = {key: float(one.e2e_s.mean()) for key, one in zip(runs, play_all(list(runs.values())), strict=True)}
    result = []
    for load in loads:
        seconds = tuple(mean_s[load, pool, 0] for pool in range(pools))
        others = [mean_s[load, 1, number] / mean_s[load, 0, number] for number in range(1, replications + 1)]
        saved = [of_replications(each / seconds[0], others if at == 0 else ()) for at, each in enumerate(seconds[1:])]
        result.append(LoadGain(load, load * per_s, seconds, tuple(one.saved() for one in saved)))
    return result
