"""Blocks of time: the seconds that requests spent in each, and the work done for them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from policies.decision import Outcome
from policies.features.request import RequestFeatures

_MASK: Final = 0xFFFFFFFFFFFFFFFF


class ArmSums:
    """Sums over the requests of one arm in a block.

    Attributes
    ----------
    seconds
        Seconds that requests spent in the block.
    work
        Units of work done for them in it.
    requests
        Requests, each by the share of its time that it spent in the block.
    arrived_work
        Units of work that arrived in it.
    """

    def __init__(self) -> None:
        self.seconds = self.work = self.requests = self.arrived_work = 0.0


class Blocks:
    """Blocks of time, counted from 1970, which are the same in all gateways and workers of a pool.

    The start of each block is left out, while the pool settles, and its end, since requests in flight then extend into
    the next one. For the same arrivals, the ratio of two arms' seconds per unit of work is that of the mean times. A
    unit of work is weighted by its kind's mean time over all arms, so that a change of the mix does not change the
    seconds per unit of work.

    Parameters
    ----------
    most_times
        Most times the mean of the fastest arm for which a block must be long enough. Requests of an arm that cannot
        keep up take ever longer, so no block would do. If arms serve side by side, a block that is too short for one
        only makes it look faster than it is.
    """

    def __init__(self, block_s: float, most_times: float = math.inf) -> None:
        self.block_s = block_s
        self._most_times = most_times
        self._mean_s = _Mean()
        self._means_s: dict[int, _Mean] = {}  # of each arm
        self._paces = Paces()
        self._open: dict[int, dict[int, ArmSums]] = {}
        self._closed = 0

    def start_over(self) -> None:
        """Forget open blocks, but not the mean times of requests."""
        self._open.clear()
        self._closed = 0

    def counts(self, now_s: float) -> bool:
        """Return whether a time is in the part of its block that counts."""
        return _SETTLES <= now_s / self.block_s % 1.0 < 1.0 - _TAIL

    def begin(self, number: int, now_s: float) -> bool:
        """Begin a block; return whether it counts, which is False if its start was missed."""
        counts = now_s < (number + _SETTLES) * self.block_s
        if counts:
            self._open[number] = {}
        return counts

    def observe(self, now_s: float, seconds: float, work: float, kind: str, arm: int) -> None:
        """Add a request that has ended now."""
        self._mean_s.add(seconds)
        self._means_s.setdefault(arm, _Mean()).add(seconds)
        work *= self._paces.of(kind, seconds, work)
        began_s, block_s = now_s - seconds, self.block_s
        last = int(now_s // block_s)
        number = arrives = max(int(began_s // block_s), last - LATE - 1)
        while number <= last:
            arms = self._open.get(number)
            if arms is not None:
                sums = arms.get(arm)
                if sums is None:
                    sums = arms[arm] = ArmSums()
                start_s = number * block_s
                end_s = start_s + (1.0 - _TAIL) * block_s
                if number == arrives and start_s <= began_s < end_s:
                    sums.arrived_work += work
                overlap_s = min(now_s, end_s) - max(began_s, start_s + _SETTLES * block_s)
                if overlap_s > 0.0:
                    part = overlap_s / seconds
                    sums.seconds += overlap_s
                    sums.work += part * work
                    sums.requests += part
            number += 1

    def closed(self, now_s: float) -> Iterator[tuple[int, dict[int, ArmSums]]]:
        """Yield and remove the blocks whose requests have ended, with the sums of each arm."""
        last = int(now_s // self.block_s)
        if last == self._closed:
            return
        self._closed = last
        for number in [number for number in self._open if number < last - LATE]:
            yield number, self._open.pop(number)

    @property
    def mean_s(self) -> float:
        """Mean seconds of recent requests; 0 while they are too few."""
        known = [mean.seconds for mean in self._means_s.values() if mean.count >= LEAST_REQUESTS]
        return min(self._mean_s.seconds, self._most_times * min(known)) if known else 0.0

    def needed_s(self) -> float | None:
        """Return how long a block must be for recent requests; None if it is long enough."""
        needed_s = self.mean_s / _TAIL
        return needed_s if needed_s > self.block_s else None


class Paces:
    """Mean seconds per unit of work of each kind of requests; new requests count more."""

    def __init__(self) -> None:
        self._all = _Pace()
        self._kinds: dict[str, _Pace] = {}

    def of(self, kind: str, seconds: float, work: float) -> float:
        """Return the mean seconds per unit of work of a kind, after adding a request."""
        pace = self._kinds.get(kind)
        if pace is None:
            if len(self._kinds) >= _MOST_KINDS:
                kind = ""
            pace = self._kinds.setdefault(kind, _Pace())
        pace.add(seconds, work)
        self._all.add(seconds, work)
        if pace.count < _LEAST_OF_KIND:
            pace = self._all
        return pace.seconds / pace.work


class _Mean:
    """A mean in which new values count more."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += max(_NEW, 1.0 / self.count) * (seconds - self.seconds)


class _Pace:
    def __init__(self) -> None:
        self.count = self.seconds = self.work = 0.0

    def add(self, seconds: float, work: float) -> None:
        self.count += 1.0
        self.seconds = _KEEP * self.seconds + seconds
        self.work = _KEEP * self.work + work


def window_s(block_s: float) -> float:
    """Return the seconds of a block in which arrivals count: from its start, before times count."""
    return (1.0 - _TAIL) * block_s


def mix(number: int) -> int:
    """Return a pseudorandom number (the finalizer of SplitMix64), the same in all processes."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def work_of(outcome: Outcome) -> float:
    """Return the units of work of a request: one per output token, and one per 50 prompt tokens."""
    return outcome.output_tokens + WORK_PER_PROMPT_TOKEN * outcome.prompt_tokens


def kind_of(request: RequestFeatures) -> str:
    """Return the kind of a request: its workload if declared, else its template."""
    return request.workload or request.template


WORK_PER_PROMPT_TOKEN: Final = 0.02
"""Work of a prompt token, relative to an output token: thousands of prompt tokens are computed at once."""
STAYS: Final = 6
"""Blocks for which a conversation stays with its group: those of a cycle."""
LATE: Final = 1
"""Blocks to wait after the end of one for its last requests."""
LEAST_REQUESTS: Final = 5.0
"""Fewest requests of an arm with which a block counts."""
FAR_LONGER: Final = 2.0
"""Ratio to another arm's request times at which nobody should wait for certainty."""
_SETTLES: Final = 0.25
_TAIL: Final = 0.125
"""Shares of a block left out at its start and at its end; the end must be as long as a mean request."""
_NEW: Final = 0.01
"""Weight of a new request in the mean time of requests."""
_KEEP: Final = 0.999
"""Decay of the sums of a kind per request."""
_MOST_KINDS: Final = 64
_LEAST_OF_KIND: Final = 20.0
