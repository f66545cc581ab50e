"""The guardrail: whole blocks of time under `least_loaded` show what a policy gains, and freeze one that loses."""

from __future__ import annotations

import logging
import math
from typing import Final

from policies.experiment.blocks import LEAST_REQUESTS, Blocks, mix
from policies.experiment.turns import Comparison, Turns
from policies.policy import GuardrailSettings

log = logging.getLogger(__name__)


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
        self._blocks = Blocks(settings.block_s)
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
        self._blocks.observe(now_s, seconds, work, kind, 0)
        self._close(now_s)

    def comparison(self, confidence: float) -> Comparison:
        """Return the ratio with an interval that may be looked at at any time, and as often as one likes."""
        return self._turns.comparison(confidence)

    @property
    def ratio(self) -> float:
        """Seconds per unit of work of the policy over those of `least_loaded`; NaN while it is too early to tell."""
        return self._turns.comparison(CONFIDENCE).ratio

    def needed_block_s(self) -> float | None:
        """Return how long a block must be for the requests of late; None if it is long enough."""
        return self._blocks.needed_s() if self._cycle else None

    def thaw(self) -> None:
        """Put the policy back in use on an operator's request, and restart the comparison."""
        self.frozen = False
        self._start_over()

    def _turn(self, now_s: float) -> None:
        """Begin the block of a time."""
        if not self._cycle:
            self._from_s, self._until_s = -math.inf, math.inf
            return
        number = int(now_s // self._block_s)
        self._from_s, self._until_s = number * self._block_s, (number + 1) * self._block_s
        self._control = self.frozen != (number == self._place(number, frozen=self.frozen))
        if self._in_doubt:
            self._control = mix(number // 2) % 2 == number % 2
        if self._blocks.begin(number, now_s):
            self._controls[number] = self._control

    def _place(self, number: int, *, frozen: bool) -> int:
        """Return which block of the cycle is the one of `least_loaded` or, of a frozen policy, the policy's own."""
        cycle = number // self._cycle
        place = mix(cycle) % self._cycle
        if frozen:
            place = (place + 1 + mix(~cycle) % (self._cycle - 1)) % self._cycle
        return cycle * self._cycle + place

    def _close(self, now_s: float) -> None:
        """Compare the blocks whose requests have ended."""
        found = False
        for number, arms in self._blocks.closed(now_s):
            found, control = True, self._controls.pop(number)
            sums = arms.get(0)
            is_enough = sums is not None and sums.requests >= LEAST_REQUESTS and sums.arrived_work > 0.0
            if sums is not None and is_enough and self.needed_block_s() is None:
                self._turns.add(number, sums.seconds / sums.work, sums.arrived_work, control=control)
        if found:
            self._judge()

    def _judge(self) -> None:
        ratio, low, high, _, _ = self._turns.comparison(self._confidence)
        if not self.frozen and low > 1.0 + self._tolerance:
            self.frozen, self.freezes = True, self.freezes + 1
            log.warning("policy frozen: it takes %.2f times as long as least_loaded", ratio)
            self._start_over()
        elif self.frozen and high < 1.0:
            self.frozen = False
            log.warning("policy back in use: it takes %.2f times as long as least_loaded", ratio)
            self._start_over()
        else:
            likely = self._turns.comparison(_DOUBT)
            self._in_doubt = likely.high < 1.0 if self.frozen else likely.low > 1.0

    def _start_over(self) -> None:
        self._turns = Turns()
        self._blocks.start_over()
        self._controls: dict[int, bool] = {}  # whether a block belongs to `least_loaded`
        self._in_doubt = self._control = False
        self._from_s, self._until_s = 0.0, 0.0


CONFIDENCE: Final = 0.95
"""Confidence of the interval that operators are shown."""
_DOUBT: Final = 0.8
"""Confidence that the policy is worse from which on every second block shows whether it is."""
