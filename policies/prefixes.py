"""What each backend's prefix cache should still hold of the prompts that were sent there."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from policies.request import RequestFeatures

MOST_REMEMBERED: Final = 20_000
"""Beginnings of prompts remembered of a backend; the one that was used longest ago is forgotten first, as in vLLM."""


class PrefixMemory:
    """Remembers the beginnings of prompts by backend.

    How long an engine keeps them depends on its memory and on everybody else who uses it. So what is remembered counts
    only as much as its engine's own reports of cached tokens bear out.
    """

    def __init__(self) -> None:
        self._seen: dict[str, OrderedDict[int, None]] = {}
        self._trust: dict[str, float] = {}

    def cached_tokens(self, backend: str, request: RequestFeatures) -> float:
        """Return how many tokens of the prompt the backend should find in its cache."""
        seen = self._seen.get(backend)
        if not seen or not request.prefix:
            return 0.0
        # A beginning is remembered only with all shorter ones, so the longest known one can be found by halving.
        low, high = 0, len(request.prefix)
        while low < high:
            middle = (low + high) // 2
            if request.prefix[middle] in seen:
                low = middle + 1
            else:
                high = middle
        return request.prefix_tokens[low - 1] * self._trust.get(backend, 1.0) if low else 0.0

    def remember(self, backend: str, request: RequestFeatures) -> None:
        """Note that a prompt was sent to a backend."""
        if not request.prefix:
            return
        seen = self._seen.get(backend)
        if seen is None:
            seen = self._seen[backend] = OrderedDict()
        for beginning in reversed(request.prefix):  # the shortest last: it is of use to most, and goes last
            seen[beginning] = None
            seen.move_to_end(beginning)
        while len(seen) > MOST_REMEMBERED:
            seen.popitem(last=False)

    def learn(self, backend: str, expected_tokens: float, cached_tokens: int) -> None:
        """Compare what was expected to be cached with what the engine says was."""
        trust = self._trust.get(backend, 1.0)
        if expected_tokens >= _LEAST_TOKENS * trust:  # before trust took from it, or little trust would be for good
            ratio = min(1.0, cached_tokens * trust / expected_tokens)
            self._trust[backend] = max(_LEAST_TRUST, trust + _STEP * (ratio - trust))

    def rehearsal(self) -> PrefixMemory:
        """Return one that knows what this one knows, and remembers nothing more."""
        return _Rehearsed(self._seen, self._trust)


class _Rehearsed(PrefixMemory):
    def __init__(self, seen: dict[str, OrderedDict[int, None]], trust: dict[str, float]) -> None:
        self._seen = seen
        self._trust = trust

    def remember(self, backend: str, request: RequestFeatures) -> None:
        pass


_LEAST_TOKENS: Final = 32.0
_STEP: Final = 0.05
_LEAST_TRUST: Final = 0.02
