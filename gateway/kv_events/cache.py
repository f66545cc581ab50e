"""The KV cache of one engine, as its events tell: up to which age it has evicted what nobody used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import msgspec

_MOST_BLOCKS: Final = 1 << 19
"""Blocks whose times are kept; the oldest go first, and then less is known of evictions."""
_LATE_NUMBERS: Final = 64
"""How far a message's number may be behind that of the last one; further, the engine has begun anew."""
_PARTS: Final = {"BlockStored": ("block_hashes", 1, 6), "BlockRemoved": ("block_hashes", 1, 2)}
"""Where the hashes and the medium of an event stand in it, which is a map or, of older versions, an array."""


class EngineCache:
    """What is known of the cache of one engine.

    vLLM evicts the blocks that have been unused for longest. So a block that goes tells that everything which was not
    used since its own last use is gone too. Which requests the blocks belong to need not be known,
    and a message that is lost costs little: the next eviction tells as much.
    """

    def __init__(self) -> None:
        self._used_s: dict[object, float] = {}  # by hash, oldest first
        self._number = -1
        self.is_known = False  # whether `evicted_s` holds; otherwise nothing was told yet, or something was missed
        self.evicted_s = -math.inf  # what was not used since then is gone
        self.is_full = False  # whether what comes evicts something
        self.heard_s = -math.inf
        self.gaps = 0
        self.nonsense = 0

    def read(self, frames: Sequence[bytes], now_s: float) -> None:
        """Read a message: topic, number, and a batch of events."""
        try:
            _, number, batch = frames
            events = [_Event(event) for event in msgspec.msgpack.decode(batch)[1]]
        except (msgspec.DecodeError, ValueError, TypeError, LookupError):
            self.nonsense += 1
            self.is_known = False
            return
        self.heard_s = now_s
        if self._follows(int.from_bytes(number, "big"), now_s):
            for event in events:
                self._apply(event, now_s)

    def _follows(self, number: int, now_s: float) -> bool:
        """Return whether a message is new."""
        last, self._number = self._number, number
        if number == last + 1 or last < 0:
            self.is_known |= number == 0  # from its start on
        elif number > last:
            self.gaps += 1
            self.is_known = False
        elif number and number >= last - _LATE_NUMBERS:
            self._number = last
            return False
        else:
            self._clear(now_s)
        return True

    def _apply(self, event: _Event, now_s: float) -> None:
        used_s = self._used_s
        if event.kind == "AllBlocksCleared":
            self._clear(now_s)
        elif event.kind == "BlockStored":
            for block in event.blocks:  # newly filled, or found by a request that begins with it
                used_s.pop(block, None)
                used_s[block] = now_s
            while len(used_s) > _MOST_BLOCKS:
                del used_s[next(iter(used_s))]
        else:
            for block in event.blocks:
                then_s = used_s.pop(block, None)
                if then_s is not None:
                    self.evicted_s = max(self.evicted_s, then_s)
                    self.is_known = self.is_full = True

    def _clear(self, now_s: float) -> None:
        self._used_s.clear()
        self.evicted_s, self.is_known, self.is_full = now_s, True, False


class _Event:
    """One event, checked."""

    def __init__(self, event: Any) -> None:
        is_map = isinstance(event, dict)
        self.kind: str = event["type"] if is_map else event[0]
        self.blocks: list[object] = []
        if self.kind == "AllBlocksCleared":
            return
        hashes, at, medium_at = _PARTS[self.kind]
        blocks = event[hashes] if is_map else event[at]
        medium = event.get("medium") if is_map else event[medium_at] if len(event) > medium_at else None
        if not isinstance(blocks, list) or not all(isinstance(block, int | bytes) for block in blocks):
            raise TypeError("blocks that have no hashes")
        # Blocks of sliding windows are freed while their request runs, and copies elsewhere are not the cache.
        window, group = (event.get("kv_cache_spec_sliding_window"), event.get("group_idx")) if is_map else (None, None)
        if medium in {None, "GPU"} and window is None:
            self.blocks = blocks if group is None else [(group, block) for block in blocks]
