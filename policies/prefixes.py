"""What a backend's prefix cache should still hold of the prompts that were sent there."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from policies.request import RequestFeatures

MOST_REMEMBERED: Final = 20_000
"""Beginnings of prompts remembered of a backend; the one that was used longest ago is forgotten first, as in vLLM."""


class PrefixMemory:
    """Remembers the beginnings of the prompts that a backend was sent.

    How long an engine keeps them depends on its memory and on everybody else who uses it. So what is remembered counts
    only as much as its engine's own reports of cached tokens bear out.
    """

    def __init__(self, most: int = MOST_REMEMBERED) -> None:
        self._most = most
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._trust = 1.0
        self._is_rehearsal = False

    def cached_tokens(self, request: RequestFeatures) -> float:
        """Return how many tokens of the prompt the backend should find in its cache."""
        seen, prefix = self._seen, request.prefix
        # A beginning is remembered only with all shorter ones, so the longest known one can be found by halving.
        low, high = 0, len(prefix) if seen else 0
        while low < high:
            middle = (low + high) // 2
            if prefix[middle] in seen:
                low = middle + 1
            else:
                high = middle
        return request.prefix_tokens[low - 1] * self._trust if low else 0.0

    def remember(self, request: RequestFeatures) -> None:
        """Note that a prompt was sent to the backend."""
        if self._is_rehearsal:
            return
        seen = self._seen
        for beginning in reversed(request.prefix):  # the shortest last: it is of use to most, and goes last
            seen[beginning] = None
            seen.move_to_end(beginning)
        while len(seen) > self._most:
            seen.popitem(last=False)

    def learn(self, expected_tokens: float, cached_tokens: int) -> None:
        """Compare what was expected to be cached with what the engine says was."""
        trust = self._trust
        if expected_tokens >= _LEAST_TOKENS * trust:  # before trust took from it, or little trust would be for good
            ratio = min(1.0, cached_tokens * trust / expected_tokens)
            self._trust = max(_LEAST_TRUST, trust + _STEP * (ratio - trust))

    def rehearsal(self) -> PrefixMemory:
        """Return one that knows what this one knows, and remembers nothing more."""
        other = PrefixMemory(self._most)
        other._seen, other._trust, other._is_rehearsal = self._seen, self._trust, True
        return other


_LEAST_TOKENS: Final = 32.0
_STEP: Final = 0.05
_LEAST_TRUST: Final = 0.02
