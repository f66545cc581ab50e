"""`gateway/recorder/_units.c` packs the hashes that numpy makes."""

from __future__ import annotations

import sys
import threading
from random import Random
from types import ModuleType
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.recorder.hashes import TextHasher
from gateway.recorder.packed import pack, unpack
from gateway.recorder.units import KINDS, cut

PIECES = [
    "a",
    "Z_",
    "_",
    "word",
    " ",
    "  ",
    "\n",
    "\t",
    "\x1f",
    "1",
    "1234567",
    ".",
    "!?",
    "\0",
    "\x7f",
    "[",
    "`",
    "{",
    "@",
]
PIECES += [
    "\u00e9",
    "\u00df",
    "\u00a7",
    "\u4e2d",
    "\u6587",
    "\uc548",
    "\u2013",
    "\u3000",
    "\U0001f600",
    "\ud800",
    "\uff01",
]
PIECES += ["seventeenletters_", "x" * 70, "-" * 30, " " * 20]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=30).map("".join)

SECRET = Random(1).randbytes(32)


def checksum(unit: bytes) -> int:
    """Return one of 24 bits, as hashes have."""
    return crc32(unit) >> 8


def by_numpy(texts: tuple[str, ...]) -> list[str]:
    """Cut texts with numpy, and pack the checksums of their units."""
    units = cut(texts)
    places = iter(zip(units.starts.tolist(), units.sizes.tolist(), strict=True))
    ends = [next(places) for _ in range(sum(units.counts))]
    sums = iter([checksum(units.data[start : start + size]) for start, size in ends])
    return [pack([next(sums) for _ in range(count)]) for count in units.counts]


@given(st.lists(TEXTS, max_size=5).map(tuple))
def test_it_cuts_as_numpy_does(units: ModuleType, texts: tuple[str, ...]) -> None:
    memory = units.Memory(KINDS, SECRET)
    assert memory.pack(texts, checksum) == by_numpy(texts)
    assert memory.pack(texts[::-1], checksum) == by_numpy(texts)[::-1]


def test_every_character_is_of_the_same_kind(units: ModuleType) -> None:
    memory = units.Memory(KINDS, SECRET)
    for begin in range(0, 0x110000, 1 << 12):
        some = [chr(point) for point in range(begin, begin + (1 << 12), 1 if begin < 1 << 14 else 37)]
        texts = tuple(f"{one}a {one}{one} 1{one}  {one}" for one in some)
        assert memory.pack(texts, checksum) == by_numpy(texts)


def test_units_are_found_again_however_many_there_were(units: ModuleType) -> None:
    draw = Random(2)
    memory = units.Memory(KINDS, SECRET)
    words = [
        " " + "".join(draw.choices("abcdefgh", k=draw.choice((3, 7, 8, 9, 15, 16, 17, 40)))) for _ in range(250_000)
    ]
    texts = tuple("".join(words[at : at + 1000]) for at in range(0, len(words), 1000))
    expected = by_numpy(texts)
    for _ in range(2):
        assert memory.pack(texts, checksum) == expected


def test_only_what_is_not_remembered_is_hashed(units: ModuleType) -> None:
    asked: list[bytes] = []

    def digest(unit: bytes) -> int:
        asked.append(unit)
        return checksum(unit)

    memory = units.Memory(KINDS, SECRET)
    memory.pack(("the cat and the cat", " the cat, a_very_long_identifier"), digest)
    assert asked == [b"the", b" cat", b" and", b" the", b",", b" a_very_long_identifier"]
    memory.pack((" cat, the a_very_long_identifiers a_very_long_identifier",), digest)
    assert asked[6:] == [b" a_very_long_identifiers"]


def test_two_units_of_one_place_are_both_remembered(units: ModuleType) -> None:
    memory = units.Memory(KINDS, SECRET)
    words = tuple(f"word_{number:x}".translate(str.maketrans("0123456789", "ghijklmnop")) for number in range(30_000))
    asked: list[bytes] = []

    def digest(unit: bytes) -> int:
        asked.append(unit)
        return checksum(unit)

    for _ in range(2):
        asked.clear()
        assert memory.pack(words, digest) == by_numpy(words)
    assert len(asked) < 0.05 * len(words)  # of places that three or more want, not two


def test_it_goes_on_after_an_error(units: ModuleType) -> None:
    memory = units.Memory(KINDS, SECRET)

    def fails(unit: bytes) -> int:
        raise ZeroDivisionError(unit)

    def calls(unit: bytes) -> Any:
        return memory.pack(("other",), checksum)

    texts = ("one two", "three")
    for digest, error in (
        (fails, ZeroDivisionError),
        (calls, RuntimeError),
        (str, TypeError),
        (lambda _: 2**24, OverflowError),
        (lambda _: -1, OverflowError),
        (None, TypeError),
    ):
        with pytest.raises(error):
            memory.pack(texts, digest)
    for wrong in ((), (texts,), (list(texts), checksum), (("text", b"bytes"), checksum), (("text", None), checksum)):
        with pytest.raises(TypeError):
            memory.pack(*wrong)
    assert memory.pack(texts, checksum) == by_numpy(texts)
    with pytest.raises(ValueError, match="256"):
        units.Memory(KINDS[:-1], bytes(32))
    with pytest.raises(ValueError, match="32"):
        units.Memory(KINDS, bytes(31))
    for arguments in ((), (KINDS,), ("text", bytes(32)), (KINDS, 1)):
        with pytest.raises(TypeError):
            units.Memory(*arguments)


def test_two_threads_do_not_disturb_each_other(units: ModuleType) -> None:
    memory = units.Memory(KINDS, SECRET)
    texts = tuple("some words and more words, 12345 " * size for size in range(1, 60))
    expected, wrong = by_numpy(texts), []

    def many() -> None:
        for _ in range(200):
            try:
                if memory.pack(texts, checksum) != expected:
                    wrong.append(True)
            except RuntimeError:  # the other's call has not ended
                pass

    threads = [threading.Thread(target=many) for _ in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong
    assert memory.pack(texts, checksum) == expected


def test_a_hasher_takes_it_where_it_is_there(units: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [("the cat sat on the mat", " and sat \u4e2d\u6587"), ("", "cat"), ("", "")]
    hashers = [TextHasher(b"salt", ngram) for ngram in (1, 2)]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gateway.recorder._units", units)
        compiled = [TextHasher(b"salt", ngram) for ngram in (1, 2)]
    for one, other in zip(hashers, compiled, strict=True):
        for _ in range(2):
            assert other.pack_all(pairs) == one.pack_all(pairs)
            assert [unpack(output) for _, output in other.pack_all(pairs)] == [
                output.tolist() for _, output in one.hash_all(pairs)
            ]
        assert other.pack_all([]) == one.pack_all([]) == []
    assert [one._compiled is not None for one in compiled] == [True, False]
