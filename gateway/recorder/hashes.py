"""Salted hashes that stand for a text: enough to tell where it repeats itself or another, and no more than that."""

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

    from gateway.recorder._units import Memory

HASH_BITS = 52
"""Of other numbers that stand for something: what a number of JSON carries exactly wherever it is read."""

Hashes = npt.NDArray[np.uint32]
_Keys = npt.NDArray[np.uint64]

_AT_ONCE = 1 << 14  # units: what is worked out for them fits a cache
_PLACE_BITS = 16


class TextHasher:
    """Turns texts into hashes: of each unit, the first 24 bits of its BLAKE2b under the salt.

    What was hashed is remembered, so that most units cost a look into a table. It is found there by a sum of the unit's
    bytes that no hash is made of, and that others cannot foresee: its factors are drawn anew by each process. (What is
    built with the gateway compiled has a table of its own, and compares the bytes.)

    Parameters
    ----------
    salt
        Whoever has it can tell what a hash stands for by trying.
    ngram
        Units that each hash stands for: the one at its place and those before it.
    tokenizer
        A `tokenizer.json`; None takes words, numbers and marks for units.

    Raises
    ------
    ValueError
        If it holds no tokenizer.
    """

    def __init__(self, salt: bytes, ngram: int = 1, tokenizer: Path | None = None) -> None:
        self._key = blake2b(salt, digest_size=32).digest()
        self._ngram = ngram
        self._tokenizer = _load(tokenizer) if tokenizer is not None else None
        self._memory = _Memory()
        self._compiled = _compiled_memory() if ngram == 1 and tokenizer is None else None
        salt_name = blake2b(b"name of the salt", key=self._key, digest_size=4).hexdigest()
        self.of_tokens = Hashing("token", ngram, salt_name)
        self.of_texts = self.of_tokens if self._tokenizer is not None else Hashing("piece", ngram, salt_name)
        """How hashes are made, of token ids and of texts."""

    def hash_ids(self, prompt: Sequence[int], output: Sequence[int]) -> tuple[list[int], list[int], Hashing]:
        """Return the hashes of a prompt and its output that came as token ids, and how they were made."""
        ((prompts, outputs),) = self.hash_all_ids([(prompt, output)])
        return prompts.tolist(), outputs.tolist(), self.of_tokens

    def hash_text(self, prompt: str, output: str) -> tuple[list[int], list[int], Hashing]:
        """Return the hashes of a prompt and its output, and how they were made."""
        ((prompts, outputs),) = self.hash_all([(prompt, output)])
        return prompts.tolist(), outputs.tolist(), self.of_texts

    def hash_all(self, texts: Sequence[tuple[str, str]]) -> list[tuple[Hashes, Hashes]]:
        """Return the hashes of prompts and their outputs: many at once take a third of the time."""
        if not texts:
            return []
        if self._tokenizer is not None:
            return self.hash_all_ids([(self._ids(prompt), self._ids(output)) for prompt, output in texts])
        units = cut([text for both in texts for text in both])
        keys = np.concatenate([_keys(units, place) for place in range(0, max(1, len(units.starts)), _AT_ONCE)])
        ends = units.starts + units.sizes

        def unit(place: int) -> bytes:
            return units.data[units.starts[place] : ends[place]]

        return self._hash(keys, units.counts, unit)

    @property
    def is_quick(self) -> bool:
        """Tell whether single texts are hashed as fast as many at once."""
        return self._compiled is not None

    def pack_all(self, texts: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return what `hash_all` does, packed: compiled, in a seventh of the time."""
        if self._compiled is None:
            return _packed(self.hash_all(texts))
        told = self._compiled.pack(tuple([text for both in texts for text in both]), self._digest)
        return list(zip(told[::2], told[1::2], strict=True))

    def pack_all_ids(self, ids: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[str, str]]:
        """Return what `hash_all_ids` does, packed."""
        return _packed(self.hash_all_ids(ids))

    def hash_all_ids(self, ids: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[Hashes, Hashes]]:
        """Return the hashes of prompts and their outputs that came as token ids."""
        if not ids:
            return []
        parts = [part for both in ids for part in both]
        units = np.fromiter((one for part in parts for one in part), np.uint64)

        def unit(place: int) -> bytes:
            return b"%d" % int(units[place])

        return self._hash(units * _ID_FACTORS[0] + _ID_FACTORS[1], list(map(len, parts)), unit)

    def _ids(self, text: str) -> list[int]:
        assert self._tokenizer is not None
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _hash(self, keys: _Keys, counts: Sequence[int], unit: Callable[[int], bytes]) -> list[tuple[Hashes, Hashes]]:
        """Return the hashes of texts, each a prompt and its output.

        Parameters
        ----------
        keys
            Of all units, one after the other.
        counts
            Units of each prompt and each output, in turns.
        unit
            Tells what stands at a place.
        """
        ends = np.cumsum(counts)
        # One text: the first n-grams of the output begin in the prompt.
        firsts = np.repeat(np.concatenate(([0], ends[1:-1:2])), np.add(counts[::2], counts[1::2]))
        if self._ngram > 1:
            keys = _of_grams(keys, np.arange(len(keys)) - firsts, self._ngram)

        def digest(place: int) -> int:
            first = max(int(firsts[place]), place - self._ngram + 1)
            return self._digest(b"\0".join(map(unit, range(first, place + 1))))

        memory = self._memory
        parts = [memory.look(keys[at : at + _AT_ONCE], digest, at) for at in range(0, len(keys), _AT_ONCE)]
        hashes = np.concatenate(parts) if parts else np.zeros(0, np.uint32)
        told = np.split(hashes, ends[:-1])
        return list(zip(told[::2], told[1::2], strict=True))

    def _digest(self, gram: bytes) -> int:
        return int.from_bytes(blake2b(gram, key=self._key, digest_size=8).digest()[: UNIT_BITS // 8], "big")


class _Memory:
    """The hashes of units seen lately, by key: two tables, and what must leave its place in one goes to the other."""

    def __init__(self) -> None:
        self._keys = np.zeros((2, 1 << _PLACE_BITS), np.uint64)
        self._hashes = np.zeros((2, 1 << _PLACE_BITS), np.uint32)

    def look(self, keys: _Keys, digest: Callable[[int], int], offset: int) -> Hashes:
        """Return the hash of each key; of those that are not remembered, `digest` of its place, `offset` added."""
        at = _first_place(keys)
        found: Hashes = self._hashes[0][at]
        missing = np.flatnonzero(self._keys[0][at] != keys)
        if missing.size:
            keys = keys[missing]
            at = _second_place(keys)
            found[missing] = self._hashes[1][at]
            is_missing = self._keys[1][at] != keys
            if is_missing.any():
                missing = missing[is_missing]
                new, first, which = np.unique(keys[is_missing], return_index=True, return_inverse=True)
                made = np.fromiter((digest(offset + place) for place in missing[first].tolist()), np.uint32, len(new))
                self._remember(new, made)
                found[missing] = made[which]
        return found

    def _remember(self, keys: _Keys, hashes: Hashes) -> None:
        at = _first_place(keys)
        old, old_hashes = self._keys[0][at], self._hashes[0][at]
        self._keys[0][at], self._hashes[0][at] = keys, hashes
        elsewhere = _second_place(old)
        self._keys[1][elsewhere], self._hashes[1][elsewhere] = old, old_hashes


def _keys(units: Units, begin: int) -> _Keys:
    """Return the keys of units, from `begin` on as many as are worked out at once."""
    starts, sizes = units.starts[begin : begin + _AT_ONCE], units.sizes[begin : begin + _AT_ONCE]
    padded = np.frombuffer(units.data + bytes(8), np.uint8)
    # The eight bytes from each place on; what is beyond the unit is masked out.
    words = np.lib.stride_tricks.as_strided(padded[:8].view("<u8"), (len(units.data) + 1,), (1,))
    keys: _Keys = (words[starts] & _MASKS[np.minimum(sizes, 8)]) * _FACTORS[0] + sizes.astype(np.uint64) * _SIZE_FACTOR
    longer = np.flatnonzero(sizes > 8)
    for place in range(1, _MOST_WORDS):
        if not longer.size:
            return keys
        begins, left = starts[longer] + 8 * place, sizes[longer] - 8 * place
        keys[longer] += (words[begins] & _MASKS[np.minimum(left, 8)]) * _FACTORS[place]
        longer = longer[left > 8]
    for one in longer.tolist():  # no word
        rest = units.data[int(starts[one]) + 8 * _MOST_WORDS : int(starts[one] + sizes[one])]
        keys[one : one + 1] += np.uint64(hash(rest) & _MOST)
    return keys


def _of_grams(keys: _Keys, places: npt.NDArray[np.int64], ngram: int) -> _Keys:
    """Return the keys of n-grams from those of units, by their places in their text."""
    grams = keys.copy()
    for back in range(1, ngram):
        grams[back:] += np.where(places[back:] >= back, keys[:-back] * _GRAM_FACTORS[back], np.uint64(0))
    return grams


def _first_place(keys: _Keys) -> npt.NDArray[np.int64]:
    return (keys >> np.uint64(64 - _PLACE_BITS)).view(np.int64)


def _second_place(keys: _Keys) -> npt.NDArray[np.int64]:
    return _first_place(keys * _SECOND_FACTOR)


def _packed(hashes: Sequence[tuple[Hashes, Hashes]]) -> list[tuple[str, str]]:
    return [(pack(prompt), pack(output)) for prompt, output in hashes]


def _compiled_memory() -> Memory | None:
    """Return what does it in C, where the gateway was built compiled."""
    try:
        from gateway.recorder._units import Memory
    except ImportError:
        return None
    return Memory(KINDS, os.urandom(32))


def _load(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    # The library raises bare exceptions from Rust for whatever is wrong with the file.
    try:
        return Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # noqa: BLE001
        raise ValueError(f"{file}: {error}") from None


_MOST_WORDS = 8
_MOST = 2**64 - 1
_DRAWN = np.random.default_rng().integers(2**64, size=32, dtype=np.uint64) | np.uint64(1)
_FACTORS: Final = _DRAWN[:_MOST_WORDS]
_GRAM_FACTORS: Final = _DRAWN[8:24]
_ID_FACTORS: Final = _DRAWN[24:26]
_SIZE_FACTOR, _SECOND_FACTOR = _DRAWN[26], _DRAWN[27]
_MASKS: Final = np.array([(1 << 8 * size) - 1 for size in range(9)], np.uint64)
