"""`gateway/rooms/recorder/_units.c` cuts and packs texts as the Python implementation does."""

from __future__ import annotations

import sys
import threading
from random import Random
from types import ModuleType
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.rooms.recorder.hashes import TextHasher
from gateway.rooms.recorder.packed import pack, unpack
from gateway.rooms.recorder.units import KINDS, cut

pytestmark = pytest.mark.slow

PIECES = [
    *"a_ \n\t\x1f1.\0\x7f[`{@\u00e9\u00df\u00a7\u4e2d\u6587\uc548\u2013\u3000\U0001f600\ud800\uff01",
    "Z_",
    "word",
    "  ",
]
PIECES += ["1234567", "!?", "seventeenletters_", "x" * 70, "-" * 30, " " * 20]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=30).map("".join)

SECRET = Random(1).randbytes(32)


def checksum(unit: bytes) -> int:
    """Return a checksum of 24 bits, as long as the hashes."""
    return crc32(unit) >> 8


def in_python(texts: tuple[str, ...]) -> list[str]:
    """Return the packed checksums of the texts' units, as Python cuts them."""
    return [pack([checksum(unit) for unit in cut(text)]) for text in texts]


@given(st.lists(TEXTS, max_size=5).map(tuple))
def test_texts_are_cut_as_in_python(units: ModuleType, texts: tuple[str, ...]) -> None:
    cache = units.HashCache(KINDS, SECRET)
    assert cache.pack(texts, checksum) == in_python(texts)
    assert cache.pack(texts[::-1], checksum) == in_python(texts)[::-1]


def test_every_character_has_the_same_kind_as_in_python(units: ModuleType) -> None:
    cache = units.HashCache(KINDS, SECRET)
    for begin in range(0, 0x110000, 1 << 12):
        signs = [chr(point) for point in range(begin, begin + (1 << 12), 1 if begin < 1 << 14 else 37)]
        texts = tuple(f"{sign}a {sign}{sign} 1{sign}  {sign}" for sign in signs)
        assert cache.pack(texts, checksum) == in_python(texts)


@pytest.mark.slow
def test_units_are_cached_however_many_there_are(units: ModuleType) -> None:
    draw = Random(2)
    cache = units.HashCache(KINDS, SECRET)
    words = [
        " " + "".join(draw.choices("abcdefgh", k=draw.choice((3, 7, 8, 9, 15, 16, 17, 40)))) for _ in range(250_000)
    ]
    texts = tuple("".join(words[start : start + 1000]) for start in range(0, len(words), 1000))
    expected = in_python(texts)
    for _ in range(2):
        assert cache.pack(texts, checksum) == expected


def test_only_units_that_are_not_cached_are_hashed(units: ModuleType) -> None:
    hashed: list[bytes] = []

    def digest(unit: bytes) -> int:
        hashed.append(unit)
        return checksum(unit)

    cache = units.HashCache(KINDS, SECRET)
    cache.pack(("the cat and the cat", " the cat, a_very_long_identifier"), digest)
    assert hashed == [b"the", b" cat", b" and", b" the", b",", b" a_very_long_identifier"]
    cache.pack((" cat, the a_very_long_identifiers a_very_long_identifier",), digest)
    assert hashed[6:] == [b" a_very_long_identifiers"]


def test_the_cache_works_after_an_error(units: ModuleType) -> None:
    cache = units.HashCache(KINDS, SECRET)

    def fails(unit: bytes) -> int:
        raise ZeroDivisionError(unit)

    texts = ("one two", "three")
    for digest, error in (
        (fails, ZeroDivisionError),
        (lambda _: cache.pack(("other",), checksum), RuntimeError),
        (str, TypeError),
        (lambda _: 2**24, OverflowError),
        (lambda _: -1, OverflowError),
    ):
        with pytest.raises(error):
            cache.pack(texts, digest)
    for wrong in ((), (texts,), (list(texts), checksum), (("text", b"bytes"), checksum), (("text", None), checksum)):
        with pytest.raises(TypeError):
            cache.pack(*wrong)
    assert cache.pack(texts, checksum) == in_python(texts)
    with pytest.raises(ValueError, match="256"):
        units.HashCache(KINDS[:-1], bytes(32))
    with pytest.raises(ValueError, match="32"):
        units.HashCache(KINDS, bytes(31))
    for arguments in ((), (KINDS,), ("text", bytes(32)), (KINDS, 1)):
        with pytest.raises(TypeError):
            units.HashCache(*arguments)


def test_two_threads_do_not_disturb_each_other(units: ModuleType) -> None:
    cache = units.HashCache(KINDS, SECRET)
    texts = tuple("some words and more words, 12345 " * size for size in range(1, 60))
    expected, wrong = in_python(texts), []

    def pack_repeatedly() -> None:
        for _ in range(200):
            try:
                if cache.pack(texts, checksum) != expected:
                    wrong.append(True)
            except RuntimeError:  # another thread's call is in progress
                pass

    threads = [threading.Thread(target=pack_repeatedly) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert cache.pack(texts, checksum) == expected


def test_a_hasher_uses_the_extension_if_it_is_available(units: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [("the cat sat on the mat", " and sat \u4e2d\u6587"), ("", "cat"), ("", "")]
    hasher = TextHasher(b"salt")
    hasher._compiled = None
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gateway.rooms.recorder._units", units)
        compiled = TextHasher(b"salt")
    assert compiled.is_quick
    for _ in range(2):
        for pair in pairs:
            assert compiled.pack(*pair) == hasher.pack(*pair)
            assert tuple(map(unpack, compiled.pack(*pair))) == hasher.hash_text(*pair)[:2]
