"""Gain of other speculative configs at each load, by simulation on requests that were not used to choose them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

    def __call__(self, run: Run) -> Replayed:
        """Simulate; with the same seed, every pool gets the same arrivals and draws."""
        if run.rate is None:
            requests = self.requests.paced(np.zeros(len(self.requests)))
            by_load = build("least_loaded", policy_reference("least_loaded", None).settings)
            return replay(self.pools[run.pool], requests, by_load, seed=run.seed)
        times_s = arrivals(self.requests.arrived_at, run.rate, 1.0, run.seed)
        policy = build(self.policy, with_seed(self.settings, run.seed))
        warmup = int(_WARMUP * len(self.requests))
        return replay(self.pools[run.pool], self.requests.paced(times_s), policy, seed=run.seed, warmup=warmup)


@dataclass(frozen=True, slots=True)
class LoadGain:
    """The gain at one load.

    Parameters
    ----------
    load
        Share of the capacity of the present pool.
    rate
        Requests per second.
    present_s, scheduled_s
        Mean time to finish.
    gain
        Share of the mean time that is saved, with its 95% interval over blocks of requests; None with too few requests.
    """

    load: float
    rate: float
    present_s: float
    scheduled_s: float
    gain: Interval | None


def capacity(play_all: PlayAll) -> float:
    """Return the requests per second of the first pool with full batches, when all requests come at once."""
    [played] = play_all([Run(0, None, 0)])
    order = np.argsort(played.e2e_s)
    done = np.cumsum(played.output_tokens[order]) / played.output_tokens.sum()
    ended = int(np.searchsorted(done, _AT_ONCE))
    return float(_AT_ONCE * len(order) / played.e2e_s[order][min(ended, len(order) - 1)])


def gains(play_all: PlayAll, per_s: float, seeds: Sequence[int], loads: Sequence[float] = LOADS) -> list[LoadGain]:
    """Return the gain of the second pool over the first at each load.

    Parameters
    ----------
    per_s
        Capacity in requests per second.
    seeds
        Seeds of the draws; their results for a request are averaged.
    """
    runs = [Run(pool, load * per_s, seed) for load in loads for pool in (0, 1) for seed in seeds]
    played = iter(play_all(runs))
    result = []
    for load in loads:
        means = [_mean([next(played) for _ in seeds]) for _ in range(2)]
        present_s, scheduled_s = (float(mean.mean()) for mean in means)
        result.append(LoadGain(load, load * per_s, present_s, scheduled_s, _gain(means[1], means[0])))
    return result


def _mean(played: Sequence[Replayed]) -> Floats:
    """Return each request's mean time to finish over the seeds."""
    return np.asarray(np.mean([one.e2e_s for one in played], axis=0))


def _gain(scheduled: Floats, present: Floats) -> Interval | None:
    length = block_length(len(present))
    try:
        ratio = interval([block_sums(scheduled, length)], [block_sums(present, length)])
    except ValueError:  # too few blocks
        return None
    return Interval(1.0 - ratio.value, 1.0 - ratio.high, 1.0 - ratio.low)
