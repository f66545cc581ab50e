"""Salted hashes in place of a text: they show where it repeats itself or another text, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from gateway.recorder.packed import HASH_BITS as UNIT_BITS
from gateway.recorder.packed import pack
from gateway.recorder.schema import Hashing
from gateway.recorder.units import KINDS, Units, cut

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from gateway.recorder._units import HashCache

HASH_BITS = 52
"""Bits of hashes in JSON numbers: all JSON readers represent 52 bits exactly."""

Hashes = npt.NDArray[np.uint32]
_Keys = npt.NDArray[np.uint64]

_CHUNK = 1 << 14  # units processed together; their arrays fit a cache
_TABLE_BITS = 16


class TextHasher:
    """Hashes texts: the hash of a unit is the first 24 bits of its BLAKE2b, keyed with the salt.

    Hashes are cached, so that most units cost a table lookup. The cache key is a weighted sum of the unit's bytes with
    random weights drawn by each process, so that collisions cannot be provoked. (The compiled extension has its own
    cache, which compares the bytes.)

    Examples
    --------
    >>> prompt, output, hashing = TextHasher(b"salt").hash_text("the cat", "a cat and the dog")
    >>> prompt[1] == output[1], prompt[0] == output[3]  # " cat" is a unit, and "the" differs from " the"
    (True, False)
    >>> hashing.unit
    'piece'
    """

    def __init__(self, salt: bytes, ngram: int = 1, tokenizer: Path | None = None) -> None:
        self._key = blake2b(salt, digest_size=32).digest()
        self._ngram = ngram  # units per hash: a unit and those before it
        # Path of a `tokenizer.json` or its folder; None takes words, numbers and marks as units.
        self._tokenizer = _load(tokenizer) if tokenizer is not None else None
        self._cache = _HashCache()
        self._compiled = _compiled_cache() if ngram == 1 and tokenizer is None else None
        salt_name = blake2b(b"name of the salt", key=self._key, digest_size=4).hexdigest()
        # of_tokens, of_texts: how token ids and texts are hashed.
        self.of_tokens = Hashing("token", ngram, salt_name)
        self.of_texts = self.of_tokens if self._tokenizer is not None else Hashing("piece", ngram, salt_name)

    def hash_ids(self, prompt: Sequence[int], output: Sequence[int]) -> tuple[list[int], list[int], Hashing]:
        """Return the hashes of the token ids of a prompt and its output, and how they were made."""
        ((prompts, outputs),) = self.hash_all_ids([(prompt, output)])
        return prompts.tolist(), outputs.tolist(), self.of_tokens

    def hash_text(self, prompt: str, output: str) -> tuple[list[int], list[int], Hashing]:
        """Return the hashes of a prompt and its output, and how they were made."""
        ((prompts, outputs),) = self.hash_all([(prompt, output)])
        return prompts.tolist(), outputs.tolist(), self.of_texts

    def hash_all(self, texts: Sequence[tuple[str, str]]) -> list[tuple[Hashes, Hashes]]:
        """Return the hashes of prompts and their outputs; a batch takes a third of the time of single texts."""
        if not texts:
            return []
        if self._tokenizer is not None:
            return self.hash_all_ids([(self._ids(prompt), self._ids(output)) for prompt, output in texts])
        units = cut([text for pair in texts for text in pair])
        keys = np.concatenate([_keys(units, start) for start in range(0, max(1, len(units.starts)), _CHUNK)])
        ends = units.starts + units.sizes

        def unit(index: int) -> bytes:
            return units.data[units.starts[index] : ends[index]]

        return self._hash(keys, units.counts, unit)

    @property
    def is_quick(self) -> bool:
        """Whether single texts are hashed as fast as in batches."""
        return self._compiled is not None

    def pack_all(self, texts: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return the hashes of prompts and their outputs, packed; the compiled extension is seven times as fast."""
        if self._compiled is None:
            return _packed(self.hash_all(texts))
        packed = self._compiled.pack(tuple([text for pair in texts for text in pair]), self._digest)
        return list(zip(packed[::2], packed[1::2], strict=True))

    def pack_all_ids(self, ids: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[str, str]]:
        """Return the hashes of the token ids of prompts and their outputs, packed."""
        return _packed(self.hash_all_ids(ids))

    def hash_all_ids(self, ids: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[Hashes, Hashes]]:
        """Return the hashes of the token ids of prompts and their outputs."""
        if not ids:
            return []
        parts = [part for pair in ids for part in pair]
        units = np.fromiter((token_id for part in parts for token_id in part), np.uint64)

        def unit(index: int) -> bytes:
            return b"%d" % int(units[index])

        return self._hash(units * _ID_FACTORS[0] + _ID_FACTORS[1], list(map(len, parts)), unit)

    def _ids(self, text: str) -> list[int]:
        assert self._tokenizer is not None
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _hash(self, keys: _Keys, counts: Sequence[int], unit: Callable[[int], bytes]) -> list[tuple[Hashes, Hashes]]:
        """Return the hashes of texts, each a prompt and its output."""
        ends = np.cumsum(counts)
        # Prompt and output are one text: the first n-grams of the output begin in the prompt.
        firsts = np.repeat(np.concatenate(([0], ends[1:-1:2])), np.add(counts[::2], counts[1::2]))
        if self._ngram > 1:
            keys = _of_grams(keys, np.arange(len(keys)) - firsts, self._ngram)

        def digest(index: int) -> int:
            first = max(int(firsts[index]), index - self._ngram + 1)
            return self._digest(b"\0".join(map(unit, range(first, index + 1))))

        cache = self._cache
        parts = [cache.look_up(keys[start : start + _CHUNK], digest, start) for start in range(0, len(keys), _CHUNK)]
        hashes = np.concatenate(parts) if parts else np.zeros(0, np.uint32)
        by_text = np.split(hashes, ends[:-1])
        return list(zip(by_text[::2], by_text[1::2], strict=True))

    def _digest(self, gram: bytes) -> int:
        return int.from_bytes(blake2b(gram, key=self._key, digest_size=8).digest()[: UNIT_BITS // 8], "big")


class _HashCache:
    """The hashes of recent units by key, in two tables: an entry evicted from the first moves to the second."""

    def __init__(self) -> None:
        self._keys = np.zeros((2, 1 << _TABLE_BITS), np.uint64)
        self._hashes = np.zeros((2, 1 << _TABLE_BITS), np.uint32)

    def look_up(self, keys: _Keys, digest: Callable[[int], int], offset: int) -> Hashes:
        """Return the hash of each key; that of a key not in the cache is `digest(offset + index)`."""
        slots = _first_slot(keys)
        hashes: Hashes = self._hashes[0][slots]
        missing = np.flatnonzero(self._keys[0][slots] != keys)
        if missing.size:
            keys = keys[missing]
            slots = _second_slot(keys)
            hashes[missing] = self._hashes[1][slots]
            is_missing = self._keys[1][slots] != keys
            if is_missing.any():
                missing = missing[is_missing]
                new, first, which = np.unique(keys[is_missing], return_index=True, return_inverse=True)
                digests = (digest(offset + index) for index in missing[first].tolist())
                new_hashes = np.fromiter(digests, np.uint32, len(new))
                self._store(new, new_hashes)
                hashes[missing] = new_hashes[which]
        return hashes

    def _store(self, keys: _Keys, hashes: Hashes) -> None:
        slots = _first_slot(keys)
        old, old_hashes = self._keys[0][slots], self._hashes[0][slots]
        self._keys[0][slots], self._hashes[0][slots] = keys, hashes
        second_slots = _second_slot(old)
        self._keys[1][second_slots], self._hashes[1][second_slots] = old, old_hashes


def _keys(units: Units, begin: int) -> _Keys:
    """Return the keys of a chunk of units that starts at the index `begin`."""
    starts, sizes = units.starts[begin : begin + _CHUNK], units.sizes[begin : begin + _CHUNK]
    padded = np.frombuffer(units.data + bytes(8), np.uint8)
    # The eight bytes from each offset on; those beyond the unit are masked out.
    words = np.lib.stride_tricks.as_strided(padded[:8].view("<u8"), (len(units.data) + 1,), (1,))
    keys: _Keys = (words[starts] & _MASKS[np.minimum(sizes, 8)]) * _FACTORS[0] + sizes.astype(np.uint64) * _SIZE_FACTOR
    longer = np.flatnonzero(sizes > 8)
    for word in range(1, _MAX_WORDS):
        if not longer.size:
            return keys
        begins, left = starts[longer] + 8 * word, sizes[longer] - 8 * word
        keys[longer] += (words[begins] & _MASKS[np.minimum(left, 8)]) * _FACTORS[word]
        longer = longer[left > 8]
    for index in longer.tolist():  # units of more than 64 bytes are rare
        rest = units.data[int(starts[index]) + 8 * _MAX_WORDS : int(starts[index] + sizes[index])]
        keys[index : index + 1] += np.uint64(hash(rest) & _UINT64_MAX)
    return keys


def _of_grams(keys: _Keys, positions: npt.NDArray[np.int64], ngram: int) -> _Keys:
    """Return the keys of n-grams from those of units and their positions in their text."""
    grams = keys.copy()
    for back in range(1, ngram):
        grams[back:] += np.where(positions[back:] >= back, keys[:-back] * _GRAM_FACTORS[back], np.uint64(0))
    return grams


def _first_slot(keys: _Keys) -> npt.NDArray[np.int64]:
    return (keys >> np.uint64(64 - _TABLE_BITS)).view(np.int64)


def _second_slot(keys: _Keys) -> npt.NDArray[np.int64]:
    return _first_slot(keys * _SECOND_FACTOR)


def _packed(hashes: Sequence[tuple[Hashes, Hashes]]) -> list[tuple[str, str]]:
    return [(pack(prompt), pack(output)) for prompt, output in hashes]


def _compiled_cache() -> HashCache | None:
    """Return the cache of the compiled extension; None if it was not built."""
    try:
        from gateway.recorder._units import HashCache
    except ImportError:
        return None
    return HashCache(KINDS, os.urandom(32))


def _load(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    # The library raises plain exceptions from Rust for any defect of the file.
    try:
        return Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # noqa: BLE001
        raise ValueError(f"{file}: {error}") from None


_MAX_WORDS = 8
_UINT64_MAX = 2**64 - 1
_RANDOM = np.random.default_rng().integers(2**64, size=32, dtype=np.uint64) | np.uint64(1)
_FACTORS: Final = _RANDOM[:_MAX_WORDS]
_GRAM_FACTORS: Final = _RANDOM[8:24]
_ID_FACTORS: Final = _RANDOM[24:26]
_SIZE_FACTOR, _SECOND_FACTOR = _RANDOM[26], _RANDOM[27]
_MASKS: Final = np.array([(1 << 8 * size) - 1 for size in range(9)], np.uint64)
