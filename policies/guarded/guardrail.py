"""The guardrail: whole blocks of time under `least_loaded` show what a policy gains, and freeze one that loses."""

from __future__ import annotations

import logging
import math
from typing import Final

from policies.decision import Outcome
from policies.features.request import RequestFeatures
from policies.guarded.gain import Comparison, GainEstimate
from policies.policy import GuardrailSettings

log = logging.getLogger(__name__)


class _Block:
    """What is known of a block of time."""

    def __init__(self, *, control: bool) -> None:
        self.control = control
        self.seconds = self.work = self.requests = self.arrived_work = 0.0


class _Pace:
    """Sums of the requests of one kind, the new ones counting more."""

    def __init__(self) -> None:
        self.count = self.seconds = self.work = 0.0

    def add(self, seconds: float, work: float) -> None:
        self.count += 1.0
        self.seconds = _KEEP * self.seconds + seconds
        self.work = _KEEP * self.work + work


class Guardrail:
    """A comparison of a policy with `least_loaded` by switching the whole pool between them: a switchback.

    A request under `least_loaded` in a pool that the policy has loaded shows neither what the policy does to others nor
    what `least_loaded` would do with the pool. So time is divided into blocks, counted from 1970, which are the same in
    all gateways and workers of a pool. In each cycle of them, one at a place that looks random belongs to
    `least_loaded`. Of each block, its beginning is left out, in which the pool settles, and its end, since requests
    that are in flight then are also the next one's.

    If the policy seems worse, but not yet for sure, every second block belongs to `least_loaded`. If it is worse, it is
    frozen: `least_loaded` decides, except in one block of each cycle, which shows when the policy is better again.

    The metric is seconds per unit of work: the times that requests spent in a block, over the work that they had done
    in it. For the same arrivals, its ratio is that of the mean times. A unit of work of a kind of requests counts as
    much as it takes on average, under either, so that a change of the mix is none of the seconds per unit of work.
    """

    def __init__(self, settings: GuardrailSettings) -> None:
        self.frozen = False  # whether the policy was found to be worse and is out of use
        self.freezes = 0  # number of freezes so far
        # Copied, because reading a pydantic field takes as long as everything that is done with it per request.
        self._cycle = round(1.0 / settings.share) if settings.share else 0
        self._tolerance, self._confidence, self._block_s = settings.tolerance, settings.confidence, settings.block_s
        self._mean_s = 0.0
        self._all = _Pace()
        self._paces: dict[str, _Pace] = {}
        self._start_over()

    def share(self) -> float:
        """Return the share of time that belongs to `least_loaded` at present."""
        if not self._cycle:
            return 0.0
        if self._in_doubt:
            return 0.5
        return 1.0 - 1.0 / self._cycle if self.frozen else 1.0 / self._cycle

    def by_control(self, now_s: float) -> bool:
        """Return whether `least_loaded` decides now."""
        if not self._from_s <= now_s < self._until_s:
            self._turn(now_s)
        return self._control

    def observe(self, now_s: float, seconds: float, work: float, kind: str) -> None:
        """Add a request that has ended now, and freeze or thaw the policy if that makes the comparison conclusive."""
        if seconds <= 0.0 or work <= 0.0 or not self._cycle:
            return
        self._mean_s += _NEW * (seconds - self._mean_s)
        work *= self._pace(kind, seconds, work)
        began_s, block_s = now_s - seconds, self._block_s
        last = int(now_s // block_s)
        number = max(int(began_s // block_s), last - _LATE - 1)
        arrives = number
        while number <= last:
            block = self._blocks.get(number)
            if block is not None:
                start_s = number * block_s
                end_s = start_s + (1.0 - _TAIL) * block_s
                if number == arrives and start_s <= began_s < end_s:
                    block.arrived_work += work
                overlap_s = min(now_s, end_s) - max(began_s, start_s + _SETTLES * block_s)
                if overlap_s > 0.0:
                    part = overlap_s / seconds
                    block.seconds += overlap_s
                    block.work += part * work
                    block.requests += part
            number += 1
        if last != self._closed:
            self._close(last)

    def comparison(self, confidence: float) -> Comparison:
        """Return the ratio with an interval that may be looked at at any time, and as often as one likes."""
        return self._gain.comparison(confidence)

    @property
    def ratio(self) -> float:
        """Seconds per unit of work of the policy over those of `least_loaded`; NaN while it is too early to tell."""
        return self._gain.comparison(CONFIDENCE).ratio

    def needed_block_s(self) -> float | None:
        """Return how long a block must be for the requests of late; None if it is long enough."""
        needed_s = self._mean_s / _TAIL
        return needed_s if self._cycle and needed_s > self._block_s else None

    def thaw(self) -> None:
        """Put the policy back in use on an operator's request, and restart the comparison."""
        self.frozen = False
        self._start_over()

    def _pace(self, kind: str, seconds: float, work: float) -> float:
        """Return the mean seconds per unit of work of a kind, after adding a request."""
        pace = self._paces.get(kind)
        if pace is None:
            if len(self._paces) >= _MOST_KINDS:
                kind = ""
            pace = self._paces.setdefault(kind, _Pace())
        pace.add(seconds, work)
        self._all.add(seconds, work)
        if pace.count < _LEAST_OF_KIND:
            pace = self._all
        return pace.seconds / pace.work

    def _turn(self, now_s: float) -> None:
        """Begin the block of a time."""
        if not self._cycle:
            self._from_s, self._until_s = -math.inf, math.inf
            return
        number = int(now_s // self._block_s)
        self._from_s, self._until_s = number * self._block_s, (number + 1) * self._block_s
        self._control = self.frozen != (number == self._place(number, frozen=self.frozen))
        if self._in_doubt:
            self._control = _mix(number // 2) % 2 == number % 2
        if now_s < self._from_s + _SETTLES * self._block_s:  # else its beginning was another's
            self._blocks[number] = _Block(control=self._control)

    def _place(self, number: int, *, frozen: bool) -> int:
        """Return which block of the cycle is the one of `least_loaded` or, of a frozen policy, the policy's own."""
        cycle = number // self._cycle
        place = _mix(cycle) % self._cycle
        if frozen:
            place = (place + 1 + _mix(~cycle) % (self._cycle - 1)) % self._cycle
        return cycle * self._cycle + place

    def _close(self, last: int) -> None:
        """Compare the blocks whose requests have ended."""
        self._closed = last
        closed = [number for number in self._blocks if number < last - _LATE]
        for number in closed:
            block = self._blocks.pop(number)
            if block.requests >= _LEAST_REQUESTS and block.arrived_work > 0.0 and self.needed_block_s() is None:
                self._gain.add(number // GROUP, block.seconds / block.work, block.arrived_work, control=block.control)
        if closed:
            self._judge()

    def _judge(self) -> None:
        ratio, low, high, _, _ = self._gain.comparison(self._confidence)
        if not self.frozen and low > 1.0 + self._tolerance:
            self.frozen, self.freezes = True, self.freezes + 1
            log.warning("policy frozen: it takes %.2f times as long as least_loaded", ratio)
            self._start_over()
        elif self.frozen and high < 1.0:
            self.frozen = False
            log.warning("policy back in use: it takes %.2f times as long as least_loaded", ratio)
            self._start_over()
        else:
            likely = self._gain.comparison(_DOUBT)
            self._in_doubt = likely.high < 1.0 if self.frozen else likely.low > 1.0

    def _start_over(self) -> None:
        self._gain = GainEstimate()
        self._blocks: dict[int, _Block] = {}
        self._in_doubt = self._control = False
        self._from_s, self._until_s, self._closed = 0.0, 0.0, 0


def _mix(number: int) -> int:
    """Return a number that looks random (the finaliser of SplitMix64), the same in all processes."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def work_of(outcome: Outcome) -> float:
    """Return the units of work of a request: an output token each, and 50 prompt tokens."""
    return outcome.output_tokens + WORK_PER_PROMPT_TOKEN * outcome.prompt_tokens


def kind_of(request: RequestFeatures) -> str:
    """Return the kind of a request as far as it is told: its workload, else its template."""
    return request.workload or request.template


WORK_PER_PROMPT_TOKEN: Final = 0.02
"""Work of a prompt token, relative to an output token: thousands of prompt tokens are computed at a time."""
CONFIDENCE: Final = 0.95
"""Confidence of the interval that operators are shown."""
GROUP: Final = 12
"""Neighbouring blocks that are compared with each other."""
_SETTLES: Final = 0.25
_TAIL: Final = 0.125
"""Shares of a block that are left out at its beginning and at its end; the end must be as long as a mean request."""
_LATE: Final = 1
"""Blocks after the end of one for which its last requests are awaited."""
_LEAST_REQUESTS: Final = 5.0
_DOUBT: Final = 0.8
"""Confidence that the policy is worse from which on every second block shows whether it is."""
_NEW: Final = 0.01
"""Weight of a new request in the mean time of requests."""
_KEEP: Final = 0.999
"""Decay of the sums of a kind per request."""
_MOST_KINDS: Final = 64
_LEAST_OF_KIND: Final = 20.0
_MASK: Final = 0xFFFFFFFFFFFFFFFF
