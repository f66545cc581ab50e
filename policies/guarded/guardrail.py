"""The guardrail: blocks of time under `least_loaded` show what a policy gains, and freeze one that loses."""

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

    A single request under `least_loaded`, in a pool that the policy has loaded, shows neither what the policy does to
    others nor what `least_loaded` would do with the pool. So time is divided into blocks, counted from 1970, which are
    the same in all gateways and workers of a pool. In each cycle, one block at a pseudorandom place belongs to
    `least_loaded`. The start of each block is left out, while the pool settles, and its end, since requests in flight
    then extend into the next one.

    If the policy seems worse, but not yet for sure, every second block belongs to `least_loaded`. If it is worse, it is
    frozen: `least_loaded` decides, except in one block of each cycle, which shows when the policy is better again.

    The metric is seconds per unit of work: the time that requests spent in a block, over the work done for them. For
    the same arrivals, its ratio is that of the mean times. A unit of work is weighted by the mean time of its kind of
    requests, under both, so that a change of the mix does not change the metric.
    """

    def __init__(self, settings: GuardrailSettings) -> None:
        self.frozen = False  # whether the policy was found to be worse and does not decide
        self.freezes = 0  # number of freezes so far
        # Copied, because reading a pydantic field takes as long as all its use per request.
        self._cycle = round(1.0 / settings.share) if settings.share else 0
        self._tolerance, self._confidence, self._block_s = settings.tolerance, settings.confidence, settings.block_s
        self._blocks = Blocks(settings.block_s)
        self._start_over()

    def share(self) -> float:
        """Return the share of time that currently belongs to `least_loaded`."""
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
        """Return the ratio with an interval that holds however often one looks."""
        return self._turns.comparison(confidence)

    @property
    def ratio(self) -> float:
        """Seconds per unit of work of the policy over those of `least_loaded`; NaN while it is too early to tell."""
        return self._turns.comparison(CONFIDENCE).ratio

    def needed_block_s(self) -> float | None:
        """Return how long a block must be for recent requests; None if it is long enough."""
        return self._blocks.needed_s() if self._cycle else None

    def thaw(self) -> None:
        """Unfreeze the policy at an operator's request, and restart the comparison."""
        self.frozen = False
        self._start_over()

    def _turn(self, now_s: float) -> None:
        """Begin the block at a time."""
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
        """Return the block of the cycle that belongs to `least_loaded` or, if frozen, to the policy."""
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
"""Confidence of the interval shown to operators."""
_DOUBT: Final = 0.8
"""Confidence that the policy is worse from which every second block belongs to `least_loaded`."""
