"""A model of each backend's prefix cache: the prompt prefixes that were sent there and should still be cached."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from policies.features.request import RequestFeatures

MAX_PREFIXES: Final = 20_000
"""Maximum prefixes per backend, which bounds the memory that a gateway spends on them."""


class PrefixMemory:
    """The prompt prefixes that were sent to the backends of a pool.

    All backends share one table from prefix to holders. A table per backend would exceed the processor's caches, and
    looking into each would take longer than the rest of a prediction.
    """

    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes  # maximum prefixes per backend
        self._holders: dict[int, int] = {}  # by prefix; one bit per backend
        self._backends = 0
        self._free_bits: list[int] = []  # of backends that have left

    def holders(self, request: RequestFeatures) -> list[int]:
        """Return the bit mask of holders of each prefix of a prompt, shortest first, up to the first without any."""
        masks = []
        for prefix in request.prefix:
            holders = self._holders.get(prefix, 0)
            if not holders:
                break  # a backend that holds a prefix also holds all shorter ones
            masks.append(holders)
        return masks

    def add_backend(self) -> BackendPrefixes:
        """Return the prefixes of a new backend, without any yet."""
        if self._free_bits:
            bit = self._free_bits.pop()
        else:
            bit = 1 << self._backends
            self._backends += 1
        return BackendPrefixes(self._holders, bit, self._max_prefixes)

    def remove_backend(self, prefixes: BackendPrefixes) -> None:
        """Forget the prefixes of a backend that has left; they must not be used any more."""
        self._free_bits.append(prefixes.clear())


class BackendPrefixes:
    """The prompt prefixes that were sent to one backend.

    How long an engine caches a prefix depends on its memory and its other clients. So the estimate is scaled by a trust
    factor, learned from the engine's reports of cached tokens.
    """

    def __init__(self, holders: dict[int, int], bit: int, max_prefixes: int) -> None:
        self._holders = holders  # the table shared with the other backends
        self._bit = bit  # bit of this backend in the table
        self._max_prefixes = max_prefixes
        self._used: OrderedDict[int, int] = OrderedDict()  # tokens beyond the next shorter one; most recently used last
        self._tokens = 0
        self._capacity = 0
        self._trust = 1.0

    def cached_tokens(self, request: RequestFeatures, holders: list[int]) -> float:
        """Return the prompt tokens expected in the backend's cache, given the request's `PrefixMemory.holders`."""
        bit = self._bit
        low, high = 0, len(holders)
        while low < high:  # bisection: a backend that holds a prefix also holds all shorter ones
            middle = (low + high) // 2
            if holders[middle] & bit:
                low = middle + 1
            else:
                high = middle
        return request.prefix_tokens[low - 1] * self._trust if low else 0.0

    def remember(self, request: RequestFeatures) -> None:
        """Add the prefixes of a prompt that is sent to the backend."""
        used, holders, lengths = self._used, self._holders, request.prefix_tokens
        index = len(request.prefix)
        for prefix in reversed(request.prefix):  # the shortest last: it is the most useful, so it is evicted last
            index -= 1
            if prefix in used:
                used.move_to_end(prefix)
            else:
                tokens = lengths[index] - lengths[index - 1] if index else lengths[0]
                used[prefix] = tokens
                self._tokens += tokens
                holders[prefix] = holders.get(prefix, 0) | self._bit
        self._evict()

    def learn(self, expected_tokens: float, cached_tokens: int) -> None:
        """Update the trust factor from the expected and the reported number of cached tokens."""
        trust = self._trust
        if expected_tokens >= _MIN_TOKENS * trust:  # scaled by trust, or low trust could never recover
            ratio = min(1.0, cached_tokens * trust / expected_tokens)
            self._trust = max(_MIN_TRUST, trust + _STEP * (ratio - trust))

    def resize(self, capacity_tokens: int) -> None:
        """Set the tokens that the engine's KV cache holds; 0 if unknown."""
        if capacity_tokens != self._capacity:
            self._capacity = capacity_tokens
            self._evict()

    def is_full_with(self, tokens: float) -> bool:
        """Return whether the engine must evict prefixes for that many tokens."""
        return self._capacity > 0 and self._tokens + tokens > self._capacity

    def clear(self) -> int:
        """Forget all prefixes, and return the bit of the backend."""
        while self._used:
            self._forget()
        return self._bit

    def _evict(self) -> None:
        """Forget the least recently used prefixes beyond the capacity, as vLLM evicts blocks."""
        while len(self._used) > self._max_prefixes or (self._capacity and self._tokens > self._capacity):
            self._forget()

    def _forget(self) -> None:
        prefix, tokens = self._used.popitem(last=False)
        self._tokens -= tokens
        holders = self._holders[prefix] & ~self._bit
        if holders:
            self._holders[prefix] = holders
        else:
            del self._holders[prefix]


_MIN_TOKENS: Final = 32.0
_STEP: Final = 0.05
_MIN_TRUST: Final = 0.02
