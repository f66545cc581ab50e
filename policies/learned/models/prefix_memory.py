"""What each backend's prefix cache should still hold of the prompts that were sent there."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from policies.features.request import RequestFeatures

MOST_REMEMBERED: Final = 20_000
"""Beginnings of prompts remembered of a backend; the one that was used longest ago is forgotten first, as in vLLM."""


class PrefixMemory:
    """Remembers the beginnings of prompts, and which backends were sent them.

    In one table for all: a pool's memories are larger than a processor's caches, and to look into each of them takes
    longer than all else that a prediction does.

    Parameters
    ----------
    most
        Beginnings remembered of each backend.
    """

    def __init__(self, most: int = MOST_REMEMBERED) -> None:
        self._most = most
        self._holders: dict[int, int] = {}  # by beginning; a bit for each backend
        self._backends = 0
        self._is_rehearsal = False

    def holders(self, request: RequestFeatures) -> list[int]:
        """Return who holds each of a prompt's beginnings, the shortest first, as far as anybody does."""
        held = []
        for beginning in request.prefix:
            holders = self._holders.get(beginning, 0)
            if not holders:
                break  # a beginning is remembered only with all shorter ones
            held.append(holders)
        return held

    def of_another_backend(self) -> BackendPrefixes:
        """Return the memory of one backend more."""
        bit = 1 << self._backends
        self._backends += 1
        return BackendPrefixes(self._holders, bit, self._most, remembers=not self._is_rehearsal)

    def dry_run_copy(self) -> PrefixMemory:
        """Return one that knows what this one knows, and remembers nothing more."""
        other = PrefixMemory(self._most)
        other._holders, other._backends, other._is_rehearsal = self._holders, self._backends, True
        return other


class BackendPrefixes:
    """What one backend was sent.

    How long an engine keeps it depends on its memory and on everybody else who uses it. So what is remembered counts
    only as much as its engine's own reports of cached tokens bear out.

    Parameters
    ----------
    holders
        Of the memory, which the backends share.
    bit
        The backend's own.
    """

    def __init__(self, holders: dict[int, int], bit: int, most: int, *, remembers: bool) -> None:
        self._holders = holders
        self._bit = bit
        self._most = most
        self._remembers = remembers
        self._used: OrderedDict[int, None] = OrderedDict()  # the latest last
        self._trust = 1.0

    def cached_tokens(self, request: RequestFeatures, holders: list[int]) -> float:
        """Return how many tokens of the prompt the backend should find in its cache; `holders` are the request's."""
        bit = self._bit
        low, high = 0, len(holders)
        while low < high:  # all that are shorter than one that it holds it holds too
            middle = (low + high) // 2
            if holders[middle] & bit:
                low = middle + 1
            else:
                high = middle
        return request.prefix_tokens[low - 1] * self._trust if low else 0.0

    def remember(self, request: RequestFeatures) -> None:
        """Note that a prompt was sent to the backend."""
        if not self._remembers:
            return
        used, holders = self._used, self._holders
        for beginning in reversed(request.prefix):  # the shortest last: it is of use to most, and goes last
            if beginning in used:
                used.move_to_end(beginning)
            else:
                used[beginning] = None
                holders[beginning] = holders.get(beginning, 0) | self._bit
        while len(used) > self._most:
            self._forget(used.popitem(last=False)[0])

    def learn(self, expected_tokens: float, cached_tokens: int) -> None:
        """Compare what was expected to be cached with what the engine says was."""
        trust = self._trust
        if expected_tokens >= _LEAST_TOKENS * trust:  # before trust took from it, or little trust would be for good
            ratio = min(1.0, cached_tokens * trust / expected_tokens)
            self._trust = max(_LEAST_TRUST, trust + _STEP * (ratio - trust))

    def dry_run_copy(self) -> BackendPrefixes:
        """Return one that knows what this one knows, and remembers nothing more."""
        other = BackendPrefixes(self._holders, self._bit, self._most, remembers=False)
        other._used, other._trust = self._used, self._trust
        return other

    def _forget(self, beginning: int) -> None:
        holders = self._holders[beginning] & ~self._bit
        if holders:
            self._holders[beginning] = holders
        else:
            del self._holders[beginning]


_LEAST_TOKENS: Final = 32.0
_STEP: Final = 0.05
_LEAST_TRUST: Final = 0.02
