"""What is known of an engine's cache by its events, also when these are lost, late, repeated or nonsense."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import msgspec
import pytest

from gateway.rooms.kv_events.cache import EngineCache


def stored(*blocks: int | bytes, **fields: Any) -> dict[str, Any]:
    rest = {"parent_block_hash": None, "token_ids": [1] * 16, "block_size": 16, "lora_id": None, "lora_name": None}
    return {"type": "BlockStored", "block_hashes": blocks, "medium": "GPU", **rest, **fields}


def removed(*blocks: int | bytes, **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": blocks, "medium": "GPU", **fields}


def message(number: int, *events: Any) -> list[bytes]:
    return [b"", number.to_bytes(8, "big"), msgspec.msgpack.encode([0.0, events, 0])]


class Told(EngineCache):
    """A cache that was told something each second from its start on."""

    def __init__(self, *batches: list[Any]) -> None:
        super().__init__()
        self.number = 0
        for events in batches:
            self.tell(*events)

    def tell(self, *events: Any, number: int | None = None) -> None:
        self.number = self.number if number is None else number
        self.read(message(self.number, *events), self.at_s)
        self.number += 1

    @property
    def at_s(self) -> float:
        return float(self.number)


def test_what_was_used_before_an_evicted_block_is_gone() -> None:
    cache = Told([stored(1, 2)], [stored(b"three")], [stored(4)])
    assert (cache.is_known, cache.evicted_s) == (True, -math.inf), "known from its start on: nothing was evicted"
    cache.tell(removed(1))
    assert (cache.evicted_s, cache.is_full) == (0.0, True)
    cache.tell(removed(b"three"))
    assert cache.evicted_s == 1.0
    cache.tell(removed(2), removed(77))
    assert cache.evicted_s == 1.0, "an older one, and one that is not known"
    again = Told([stored(1)], [stored(2)], [stored(1)], [removed(1)])
    assert again.evicted_s == 2.0, "one that is found again counts from then"


def test_fields_that_are_not_known_are_ignored() -> None:
    new = {"lookahead_token_ids": [7] * 3, "some_field_of_2027": {"a": [1]}}
    cache = Told([stored(1, **new)], [stored(2, **new)], [removed(1, **new), {"type": "AllBlocksCleared"} | new])
    assert (cache.is_known, cache.problems, cache.evicted_s) == (True, [], 2.0)
    old = [["BlockStored", [1], None, [7] * 16, 16, None, "GPU", None, [7] * 3, {"a": 1}]]
    cache = Told(old, [["BlockRemoved", [1], "GPU", None, [7]]])
    assert (cache.is_known, cache.problems, cache.evicted_s) == (True, [], 0.0)


def test_a_gateway_that_joins_knows_from_the_first_eviction_on() -> None:
    cache = EngineCache()
    cache.read(message(500, stored(1)), 1.0)
    assert not cache.is_known
    cache.read(message(501, removed(99)), 2.0)
    assert not cache.is_known, "it does not know since when that one was unused"
    cache.read(message(502, removed(1)), 3.0)
    assert (cache.is_known, cache.evicted_s) == (True, 1.0)


def test_a_gap_ends_the_knowledge_until_the_next_eviction() -> None:
    cache = Told([stored(1)], [stored(2)])
    cache.tell(stored(3), number=5)
    assert (cache.is_known, cache.problems) == (False, ["gap"])
    cache.tell(removed(2))
    assert (cache.is_known, cache.evicted_s, cache.problems) == (True, 1.0, ["gap"])


def test_a_message_that_comes_twice_counts_once() -> None:
    cache = Told([stored(1)], [removed(1)], [stored(1)])
    cache.tell(removed(1), number=1)
    assert cache.evicted_s == 0.0
    cache.tell(removed(1), number=3)
    assert cache.evicted_s == 2.0


@pytest.mark.parametrize("number", [0, 100])
def test_an_engine_that_begins_anew_has_nothing_cached(number: int) -> None:
    cache = EngineCache()
    for each in range(200):
        cache.read(message(each, stored(each)), float(each))
    cache.read(message(number, stored(7)), 1000.0)
    assert (cache.is_known, cache.evicted_s) == (True, 1000.0)
    cache.read(message(number + 1, removed(150)), 1001.0)
    assert cache.evicted_s == 1000.0, "a block of the engine before it"


def test_a_cleared_cache_is_empty() -> None:
    cache = Told([stored(1)], [stored(2)], [removed(1), {"type": "AllBlocksCleared"}])
    assert (cache.evicted_s, cache.is_full) == (2.0, False)
    assert Told([["AllBlocksCleared"]]).evicted_s == 0.0


def test_only_the_cache_of_the_engine_itself_counts() -> None:
    windowed = stored(2, kv_cache_spec_sliding_window=128, group_idx=1)
    cache = Told([stored(1, group_idx=0), windowed, stored(3, medium="CPU")])
    cache.tell(removed(2, group_idx=1), removed(3, medium="CPU"), removed(1, group_idx=1))
    assert cache.evicted_s == -math.inf
    cache.tell(removed(1, group_idx=0))
    assert cache.evicted_s == 0.0


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"", b"\0" * 8, b"\xc1"],
        [b"", b"\0" * 8, msgspec.msgpack.encode(7)],
        message(2, ["BlockStored"]),
        message(2, ["SomethingNew", [1]]),
        message(2, stored(1) | {"block_hashes": [[1]]}),
        message(2, stored(1, group_idx=[7])),
        message(2, stored(b"x" * 65)),
        message(2, *[stored(*[1] * 20_000)] * 2),
        message(2, *[{"type": "AllBlocksCleared"}] * 20_000),
        [b"", b"\0" * 2**20, msgspec.msgpack.encode([0.0, []])],
        [b"", b"\0" * 8, b"\x92\xca\0\0\0\0" + b"\x91" * 100_000 + b"\xc0"],
        [b"", b"\0" * 8, b"\x92\xca\0\0\0\0" + b"\x91\x82\xa4type\xa6nested\xa1x" + b"\x81\xa1y" * 60_000 + b"\xc0"],
    ],
    ids=range(13),
)
def test_nonsense_ends_the_knowledge(frames: list[bytes]) -> None:
    cache = Told([stored(1)], [stored(2)])
    cache.read(frames, 2.0)
    assert (cache.is_known, cache.problems) == (False, ["nonsense"])
    cache.tell(removed(2), number=3)
    assert (cache.is_known, cache.evicted_s) == (True, 1.0)


def test_an_engine_with_too_many_blocks_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.rooms.kv_events.cache._MOST_BLOCKS", 10)
    cache = Told([stored(*range(9))], [stored(*range(90, 99))])
    assert (len(cache), cache.is_known, cache.problems) == (0, False, ["too_many"])
    cache.tell(removed(3), stored(4))
    assert not cache.is_known, "what goes first was forgotten"
    cache.tell(removed(4))
    assert cache.is_known


def test_a_block_takes_as_much_memory_whatever_its_hash_is() -> None:
    cache, blocks = EngineCache(), 10_000
    told = message(0, stored(*[b"%064d" % each for each in range(blocks)], group_idx=2**40))
    tracemalloc.start()
    try:
        cache.read(told, 1.0)
        assert tracemalloc.get_traced_memory()[0] < 120 * blocks
    finally:
        tracemalloc.stop()
    assert len(cache) == blocks
