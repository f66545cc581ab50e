"""The KV cache of one engine, by its events: the age from which it has evicted unused blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Final, Generic, Literal, TypeVar

from msgspec import DecodeError, Meta, Raw, Struct, ValidationError
from msgspec.msgpack import Decoder

MOST_BYTES: Final = 1 << 20
"""Limit for a message: a step of 64 Ki tokens sends half of that."""
_MOST_BLOCKS: Final = 1 << 18
"""Most blocks tracked, at some 80 bytes each; an engine with more is not followed."""
_LATE_NUMBERS: Final = 64
"""How far a message's number may be behind the last one; if further, the engine has restarted."""
_MOST_HASHES: Final = 1 << 15
"""Limit for a message, which then takes some 20 ms to read."""
_NUMBER_BYTES: Final = 8

Problem = Literal["gap", "nonsense", "too_many"]
_Kind = Literal["BlockStored", "BlockRemoved", "AllBlocksCleared"]
_Hashes = list[int | Annotated[bytes, Meta(max_length=64)]]
_E = TypeVar("_E")


class _Event(Struct):
    """One event."""

    type: _Kind
    block_hashes: _Hashes = []
    medium: str | None = None
    group_idx: int | None = None
    kv_cache_spec_sliding_window: int | None = None

    def blocks(self) -> list[int]:
        """Return a fixed-size id for each block, whatever the form of its hash.

        Skip blocks of sliding windows, which are freed while their request runs, and copies outside the GPU.
        """
        if self.kv_cache_spec_sliding_window is not None or self.medium not in {None, "GPU"}:
            return []
        return [hash((self.group_idx, block)) for block in self.block_hashes]


class _Batch(Struct, Generic[_E], array_like=True):
    at_s: float
    events: Annotated[list[_E], Meta(max_length=1 << 14)]


_BATCH: Final = Decoder(_Batch[_Event])
_OLD_BATCH: Final = Decoder(_Batch[list[Raw]])
_KIND, _HASHES, _TEXT = Decoder(_Kind), Decoder(_Hashes), Decoder(str | None)


class EngineCache:
    """What is known about the cache of one engine.

    vLLM evicts the least recently used blocks. So when a block is evicted, everything not used since its own last use
    is gone too. Nobody needs to know to which requests the blocks belong, and a lost message costs little: the next
    eviction says as much.
    """

    def __init__(self) -> None:
        self._used_s: dict[int, float] = {}  # by block id, oldest first
        self._number = -1
        self.is_known = False  # whether `evicted_s` is valid: not before the first event, or after a missed one
        self.evicted_s = -math.inf  # blocks not used since then are gone
        self.is_full = False  # whether new blocks evict others
        self.heard_s = -math.inf
        self.problems: list[Problem] = []  # since they were last counted

    def __len__(self) -> int:
        """Return the number of tracked blocks."""
        return len(self._used_s)

    def read(self, frames: Sequence[bytes], now_s: float) -> None:
        """Read a message: topic, number, and a batch of events. Never raises, whatever an engine sends."""
        try:
            _, number, batch = frames
            if len(number) != _NUMBER_BYTES or len(batch) > MOST_BYTES:
                raise ValueError("not a message of vLLM")  # noqa: TRY301
            events = _events_of(batch)
        except (DecodeError, ValueError, LookupError, RecursionError):
            self._doubt("nonsense")
            return
        self.heard_s = now_s
        if self._follows(int.from_bytes(number, "big"), now_s):
            for event in events:
                self._apply(event, now_s)

    def give_up(self) -> None:
        """Forget the blocks, since there are too many."""
        self._used_s.clear()
        self._doubt("too_many")

    def _doubt(self, problem: Problem) -> None:
        self.problems.append(problem)
        self.is_known = False

    def _follows(self, number: int, now_s: float) -> bool:
        """Return whether a message is new."""
        last, self._number = self._number, number
        if number == last + 1 or last < 0:
            self.is_known |= number == 0  # complete from the engine's start
        elif number > last:
            self._doubt("gap")
        elif number and number >= last - _LATE_NUMBERS:
            self._number = last
            return False
        else:
            self._clear(now_s)
        return True

    def _apply(self, event: _Event, now_s: float) -> None:
        used_s = self._used_s
        if event.type == "AllBlocksCleared":
            self._clear(now_s)
        elif event.type == "BlockStored":
            for block in event.blocks():  # newly filled, or reused by a request
                used_s.pop(block, None)
                used_s[block] = now_s
            if len(used_s) > _MOST_BLOCKS:  # the oldest are evicted first: without them, evictions say nothing
                self.give_up()
        else:
            for block in event.blocks():
                then_s = used_s.pop(block, None)
                if then_s is not None:
                    self.evicted_s = max(self.evicted_s, then_s)
                    self.is_known = self.is_full = True

    def _clear(self, now_s: float) -> None:
        self._used_s.clear()
        self.evicted_s, self.is_known, self.is_full = now_s, True, False


def _events_of(batch: bytes) -> list[_Event]:
    try:
        events = _BATCH.decode(batch).events
    except ValidationError:
        events = [_of_array(parts) for parts in _OLD_BATCH.decode(batch).events]
    if sum(len(event.block_hashes) for event in events) > _MOST_HASHES:
        raise ValueError("too many hashes")
    return events


def _of_array(parts: list[Raw]) -> _Event:
    """Return an event of older vLLM versions, which is an array."""
    kind = _KIND.decode(parts[0])
    if kind == "AllBlocksCleared":
        return _Event(kind)
    at = 6 if kind == "BlockStored" else 2
    return _Event(kind, _HASHES.decode(parts[1]), _TEXT.decode(parts[at]) if len(parts) > at else None)
