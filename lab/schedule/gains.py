"""Gain of other speculative configs at each load, by simulation on requests that were not used to choose them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from lab.evaluate.bootstrap import Interval, block_length, block_sums, interval
from lab.options.policy import policy_reference, with_seed
from lab.replay.pace import arrivals
from lab.replay.simulate import Floats, Replayed, ReplicaSpec, replay
from lab.replay.table import RequestTable
from policies.guarded.policy import build
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
    """One simulation: the index of a pool, requests per second (None: all at once), and a seed."""

    pool: int
    rate: float | None
    seed: int


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
        count = self.rounds * len(self.requests)
        if run.rate is None:
            policy, times_s = build("least_loaded", policy_reference("least_loaded", None).settings), np.zeros(count)
        else:
            policy, times_s = build(self.policy, with_seed(self.settings, run.seed)), self._times_s(run.rate, run.seed)
        repeated = list(self.requests) * self.rounds
        requests = [replace(one, arrived_s=at_s) for one, at_s in zip(repeated, times_s.tolist(), strict=True)]
        warmup = 0 if run.rate is None else int(_WARMUP * count)
        return replay(self.pools[run.pool], requests, policy, seed=run.seed, warmup=warmup)

    def _times_s(self, rate: float, seed: int) -> Floats:
        """Return the times of the trace, scaled to a rate and repeated."""
        once_s = arrivals(self.requests.arrived_at, rate, 1.0, seed)
        return np.concatenate([once_s + number * len(once_s) / rate for number in range(self.rounds)])


@dataclass(frozen=True, slots=True)
class LoadGain:
    """The gain at one load.

    Parameters
    ----------
    load
        Share of the capacity of the present pool.
    rate
        Requests per second.
    seconds
        Mean time to finish in each pool.
    gains
        Share of the first pool's time that each of the others saves, with its 95% interval over blocks of requests;
        None with too few requests.
    """

    load: float
    rate: float
    seconds: tuple[float, ...]
    gains: tuple[Interval | None, ...]


def capacity(play_all: PlayAll) -> float:
    """Return the requests per second of the first pool with full batches, when all requests come at once."""
    [played] = play_all([Run(0, None, 0)])
    order = np.argsort(played.e2e_s)
    done = np.cumsum(played.output_tokens[order]) / played.output_tokens.sum()
    ended = int(np.searchsorted(done, _AT_ONCE))
    return float(_AT_ONCE * len(order) / played.e2e_s[order][ended])


def gains(
    play_all: PlayAll, pools: int, requests: int, per_s: float, seeds: Sequence[int], loads: Sequence[float] = LOADS
) -> list[LoadGain]:
    """Return the gains of the other pools over the first at each load.

    Parameters
    ----------
    pools, requests
        Number of pools, and of requests before they are repeated.
    per_s
        Capacity in requests per second.
    seeds
        Seeds of the draws; their results for a request are averaged.
    """
    runs = [Run(pool, load * per_s, seed) for load in loads for pool in range(pools) for seed in seeds]
    played = iter(play_all(runs))
    result = []
    for load in loads:
        means = np.stack([_by_request([next(played) for _ in seeds], requests) for _ in range(pools)])
        means = means[:, ~np.isnan(means).any(axis=0)]
        saved = tuple(_gain(other, means[0]) for other in means[1:])
        result.append(LoadGain(load, load * per_s, tuple(means.mean(axis=1).tolist()), saved))
    return result


def _by_request(played: Sequence[Replayed], requests: int) -> Floats:
    """Return each request's mean time to finish over rounds and seeds, which are no independent requests."""
    number = np.concatenate([one.number for one in played]) % requests
    total_s = np.bincount(number, np.concatenate([one.e2e_s for one in played]), requests)
    with np.errstate(invalid="ignore"):  # a request that was only played in the warm-up
        return np.asarray(total_s / np.bincount(number, minlength=requests))


def _gain(other: Floats, present: Floats) -> Interval | None:
    length = block_length(len(present))
    try:
        ratio = interval([block_sums(other, length)], [block_sums(present, length)])
    except ValueError:  # too few blocks
        return None
    return Interval(1.0 - ratio.value, 1.0 - ratio.high, 1.0 - ratio.low)
