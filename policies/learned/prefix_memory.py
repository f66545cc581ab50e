"""A model of each backend's prefix cache: the prompt prefixes sent there that should still be cached."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from policies.features.request import RequestFeatures

MAX_PREFIXES: Final = 20_000
"""Most prefixes per backend, which bounds a gateway's memory."""


ESTIMATE: Final = "estimate"
_EVENTS: Final = "events"


class Reuse:
    """How likely a prefix is to be reused, by the octave of the seconds since its last use."""

    def __init__(self) -> None:
        # Prefixes that were reused, and that were forgotten, at each age.
        self._again, self._forgotten = [0.0] * _AGES, [0.0] * _AGES
        self._recomputed = [0.0] * _AGES
        self._added = 0
        self._work_out()

    def add(self, age_s: float, again: bool) -> None:
        """Count a prefix that was reused, or forgotten, at an age."""
        if again:
            self._again[_octave(age_s)] += 1.0
        else:
            self._forgotten[_octave(age_s)] += 1.0
        self._added += 1
        if self._added % _WORKED_OUT == 0:  # not each time: it takes as long as half a choice
            self._work_out()

    def recomputed(self, age_s: float) -> float:
        """Return the tokens recomputed later per evicted token of that age, including those evicted in turn."""
        return self._recomputed[_octave(age_s)]

    def _work_out(self) -> None:
        """Compute the chance of reuse at each age, from the share of prefixes that reach it and are reused then."""
        never, older = 1.0, 0.0
        for age in range(_AGES - 1, -1, -1):
            again = self._again[age]
            never *= 1.0 - (again + _PRIOR_AGAIN * _PRIOR_COUNT) / (again + older + _PRIOR_COUNT)
            older += again + self._forgotten[age]
            self._recomputed[age] = min(_MOST_RECOMPUTED, (1.0 - never) / max(1e-9, never))
        if older > _MOST_COUNT:  # new counts weigh more
            self._again = [0.5 * count for count in self._again]
            self._forgotten = [0.5 * count for count in self._forgotten]


def _octave(age_s: float) -> int:
    return min(_AGES - 1, int(math.log(max(0.0, age_s) + 1.0) * _PER_E))


class PrefixMemory:
    """The prompt prefixes sent to the backends of a pool.

    All backends share one table from prefix to holders. A table per backend would exceed the processor's caches, and
    lookups in each would take longer than the rest of a prediction.
    """

    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes  # most prefixes per backend
        self._holders: dict[int, int] = {}  # by prefix; one bit per backend
        self._backends = 0
        self._reuse = Reuse()
        self._free_bits: list[int] = []  # of backends that have left

    def holders(self, request: RequestFeatures) -> list[int]:
        """Return the holders of each prefix of a prompt as a bit mask, shortest first, up to the first without any."""
        masks = []
        for prefix in request.prefix:
            holders = self._holders.get(prefix, 0)
            if not holders:
                break  # a backend that holds a prefix also holds all shorter ones
            masks.append(holders)
        return masks

    def add_backend(self) -> BackendPrefixes:
        """Return the prefixes of a new backend, which has none yet."""
        if self._free_bits:
            bit = self._free_bits.pop()
        else:
            bit = 1 << self._backends
            self._backends += 1
        return BackendPrefixes(self._holders, bit, self._max_prefixes, self._reuse)

    def remove_backend(self, prefixes: BackendPrefixes) -> None:
        """Forget the prefixes of a backend that has left; the object must not be used afterwards."""
        self._free_bits.append(prefixes.clear())


class BackendPrefixes:
    """The prompt prefixes sent to one backend.

    How long an engine caches a prefix depends on its memory and its other clients. So a trust factor, learned from the
    engine's reports of cached tokens, scales the estimate.
    """

    def __init__(self, holders: dict[int, int], bit: int, max_prefixes: int, reuse: Reuse) -> None:
        self._holders = holders  # the table shared with the other backends
        self._bit = bit  # bit of this backend in the table
        self._max_prefixes = max_prefixes
        self._used: OrderedDict[int, int] = OrderedDict()  # tokens beyond the next shorter one; most recently used last
        # When the longest prefix of each prompt, which is evicted first, was used; and last use of the last evicted.
        self._used_s: dict[int, float] = {}
        self._oldest_s = 0.0
        self._reuse = reuse
        self._tokens = 0
        self._capacity = 0
        self._trust = 1.0
        # Source of the expectation: `events` on the engine's evictions, or an `estimate` from its capacity.
        self.goes_by = ESTIMATE
        self._is_full = False  # by the engine's events

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

    def known_tokens(self, prefixes: Sequence[int], lengths: Sequence[int]) -> float:
        """Return the tokens of a prompt expected in the cache."""
        for prefix, tokens in zip(reversed(prefixes), reversed(lengths), strict=True):
            if prefix in self._used:
                return tokens * self._trust
        return 0.0

    def remember(
        self, prefixes: Sequence[int], lengths: Sequence[int], now_s: float = 0.0, *, is_asked: bool = True
    ) -> None:
        """Add the prefixes of a prompt sent to the backend, with their lengths in tokens; shortest first.

        The end of a prompt's use is no reuse of it (`is_asked=False`).
        """
        used, holders = self._used, self._holders
        index = len(prefixes)
        is_known = False
        for prefix in reversed(prefixes):  # the shortest last: it is the most useful, so it is evicted last
            index -= 1
            if prefix in used:
                used.move_to_end(prefix)
                if not is_known:
                    is_known = True
                    before_s = self._used_s.pop(prefix, None)
                    if before_s is not None and is_asked:
                        self._reuse.add(now_s - before_s, True)
            else:
                tokens = lengths[index] - lengths[index - 1] if index else lengths[0]
                used[prefix] = tokens
                self._tokens += tokens
                holders[prefix] = holders.get(prefix, 0) | self._bit
        if prefixes:
            self._used_s[prefixes[-1]] = now_s
        self._evict(now_s)

    def learn(self, expected_tokens: float, cached_tokens: int) -> None:
        """Update the trust factor from the expected and the reported number of cached tokens."""
        trust = self._trust
        if expected_tokens >= _MIN_TOKENS * trust:  # scaled by trust, so that low trust can recover
            ratio = min(1.0, cached_tokens * trust / expected_tokens)
            self._trust = max(_MIN_TRUST, trust + _STEP * (ratio - trust))

    def evicted(self, until_s: float | None, is_full: bool) -> None:
        """Forget prefixes unused since a time, by the engine's events; None if it sends none."""
        self._is_full = is_full
        self.goes_by = ESTIMATE if until_s is None else _EVENTS
        while until_s is not None and self._used and self._first_s() < until_s:
            self._forget(until_s)

    def resize(self, capacity_tokens: int) -> None:
        """Set the capacity of the engine's KV cache in tokens; 0 if unknown."""
        if capacity_tokens != self._capacity:
            self._capacity = capacity_tokens
            self._evict(self._oldest_s)

    def recomputed(self, tokens: float, now_s: float) -> float:
        """Return the tokens recomputed later, on any backend, per token that the engine adds."""
        if self.goes_by is ESTIMATE:
            is_full = self._capacity and self._tokens + tokens > self._capacity
        else:
            is_full = self._is_full
        if not is_full:
            return 0.0
        return self._reuse.recomputed(now_s - self._first_s())

    def _first_s(self) -> float:
        """Return when the next prefix to be evicted was last used."""
        for prefix in self._used:
            return self._used_s.get(prefix, self._oldest_s)
        return self._oldest_s

    def clear(self) -> int:
        """Forget all prefixes, and return the bit of the backend."""
        while self._used:
            self._forget(-math.inf)
        return self._bit

    def _evict(self, now_s: float) -> None:
        """Forget the least recently used prefixes beyond the capacity, as vLLM evicts blocks."""
        while len(self._used) > self._max_prefixes or 0 < self._capacity < self._tokens:
            self._forget(now_s)

    def _forget(self, now_s: float) -> None:
        prefix, tokens = self._used.popitem(last=False)
        used_s = self._used_s.pop(prefix, None)
        if used_s is not None:
            self._oldest_s = used_s
            if now_s >= used_s:
                self._reuse.add(now_s - used_s, False)
        self._tokens -= tokens
        holders = self._holders[prefix] & ~self._bit
        if holders:
            self._holders[prefix] = holders
        else:
            del self._holders[prefix]


_AGES: Final = 18
_PER_E: Final = 1.0 / math.log(2.0)
_WORKED_OUT: Final = 32
_PRIOR_COUNT: Final = 5.0
_PRIOR_AGAIN: Final = 1.0 - 3.0 ** (-1.0 / _AGES)
_MOST_COUNT: Final = 2000.0
_MOST_RECOMPUTED: Final = 4.0
"""Most tokens recomputed per evicted one, even if all are reused: a cache full of such also evicts others."""
_MIN_TOKENS: Final = 32.0
_STEP: Final = 0.05
_MIN_TRUST: Final = 0.02
