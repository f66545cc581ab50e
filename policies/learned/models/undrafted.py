"""Steps without drafts: those of a request beyond its drafter's limit, and of all that run beside it."""

from __future__ import annotations

import math
from typing import Final


class Undrafted:
    """The steps without drafts that are expected of a request, on a replica whose drafter has a limit."""

    def __init__(self, probability: float, tokens: float, left: float, after_s: float, harms_others: bool) -> None:
        self.probability = probability  # of a context beyond the limit
        self.tokens = tokens  # tokens of its answer beyond it, each of which is a step
        self._left = left  # steps for which those before it take the drafts of all
        self.after_s = after_s  # seconds after it was sent until it can be there; infinite where that harms no other
        self._harms_others = harms_others

    def steps(self, tokens: float, per_step: float) -> float:
        """Return the steps of an answer of so many tokens, where those that have drafts give so many tokens."""
        drafted = tokens - self.tokens
        drafted -= _shared(drafted, self._left)
        return max(1.0, tokens - drafted + drafted / per_step)

    def taken(self, requests: int, tokens_left: float, mean: float, per_step: float) -> float:
        """Return the steps that others lose: those here, and the mean number of requests on a replica after them."""
        if not self._harms_others:
            return 0.0
        more = self.tokens - _shared(self.tokens, self._left)  # where their drafts are not taken by others already
        met = _shared(more, tokens_left)
        return (1.0 - 1.0 / per_step) * (requests * met + mean * (more - met))


def undrafted(room: float, tokens: float, spread: float) -> tuple[float, float]:
    """Return the probability that an answer is longer than `room` tokens, and how many more tokens are expected.

    Answers are log-normal: `tokens` is their mean, `spread` the standard deviation of their logarithm.
    """
    if room <= 0.0:
        return 1.0, tokens
    if room > _FAR * tokens:
        return 0.0, 0.0
    distance, half = math.log(tokens / room) / spread, spread / 2.0
    probability = _normal(distance - half)
    return probability, max(0.0, tokens * _normal(distance + half) - room * probability)


def longest(steps: float, count: float) -> float:
    """Return the mean of the longest of `count` numbers of steps whose sum is `steps`; `count` may be a fraction."""
    return steps if count <= 1.0 else steps / count * (1.0 + math.log(count))


def _shared(steps: float, others: float) -> float:
    """Return the steps that two requests share, of whose steps these means are left."""
    return steps * others / (steps + others) if others > 0.0 else 0.0


def _normal(distance: float) -> float:
    return 0.5 * math.erfc(-distance / _ROOT_OF_TWO)


_FAR: Final = 8.0
_ROOT_OF_TWO: Final = math.sqrt(2.0)
