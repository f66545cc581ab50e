"""Steps without drafts: those of a request beyond its drafter's limit, and of all that run beside it."""

from __future__ import annotations

import math


class Undrafted:
    """The steps without drafts that are expected of a request, on a replica whose drafter has a limit."""

    def __init__(self, room: float, tokens: float, left: float, harms_others: bool) -> None:
        self.room = room  # tokens that its answer may have within the limit; infinite if it cannot have more
        self.tokens = tokens  # tokens of its answer beyond it, each of which is a step
        self._left = left  # steps for which those before it take the drafts of all
        self.harms_others = harms_others

    def steps(self, tokens: float, per_step: float) -> float:
        """Return the steps of an answer of so many tokens, where those that have drafts give so many tokens."""
        drafted = tokens - self.tokens
        drafted -= _shared(drafted, self._left)
        return max(1.0, tokens - drafted + drafted / per_step)

    def taken(self, requests: int, tokens_left: float, mean: float, per_step: float) -> float:
        """Return the steps that others lose: those here, and the mean number of requests on a replica after them."""
        if not self.harms_others:
            return 0.0
        more = self.tokens - _shared(self.tokens, self._left)  # where their drafts are not taken by others already
        met = _shared(more, tokens_left)
        return (1.0 - 1.0 / per_step) * (requests * met + mean * (more - met))


def longest(steps: float, count: int) -> float:
    """Return the mean of the longest of `count` numbers of steps whose sum is `steps`."""
    return steps if count <= 1.0 else steps / count * (1.0 + math.log(count))


def _shared(steps: float, others: float) -> float:
    """Return the steps that two requests share, of whose steps these means are left."""
    return steps * others / (steps + others) if others > 0.0 else 0.0
