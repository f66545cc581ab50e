"""Salted hashes in place of a text: they show only where it repeats itself or another text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Final

from backends.files.regular import read_text
from gateway.rooms.recorder.packed import HASH_BITS as UNIT_BITS
from gateway.rooms.recorder.packed import pack
from gateway.rooms.recorder.schema import Hashing
from gateway.rooms.recorder.units import KINDS, cut

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from gateway.rooms.recorder._units import HashCache

HASH_BITS = 52
"""Bits of hashes in JSON numbers: all JSON readers represent 52 bits exactly."""

_MOST_BYTES: Final = 1 << 28  # of a tokenizer
_KNOWN: Final = 1 << 17
"""Most hashes in the cache."""


class TextHasher:
    """Hashes texts: the hash of a unit is the first 24 bits of its BLAKE2b, keyed with the salt.

    Most units cost one table lookup; in the compiled extension, if built, it takes a tenth of the time.

    Examples
    --------
    >>> prompt, output, hashing = TextHasher(b"salt").hash_text("the cat", "a cat and the dog")
    >>> prompt[1] == output[1], prompt[0] == output[3]  # " cat" is a unit, and "the" differs from " the"
    (True, False)
    >>> hashing.unit
    'piece'
    """

    def __init__(self, salt: bytes, tokenizer: Path | None = None) -> None:
        self._key = blake2b(salt, digest_size=32).digest()
        # From a `tokenizer.json` or its folder; None uses words, numbers and marks as units.
        self._tokenizer = _load(tokenizer) if tokenizer is not None else None
        self._compiled = _compiled_cache() if tokenizer is None else None
        self._hash = lru_cache(_KNOWN)(self._digest)
        salt_name = blake2b(b"name of the salt", key=self._key, digest_size=4).hexdigest()
        # of_tokens, of_texts: how token ids and texts are hashed.
        self.of_tokens = Hashing("token", salt=salt_name)
        self.of_texts = self.of_tokens if self._tokenizer is not None else Hashing("piece", salt=salt_name)

    @property
    def is_quick(self) -> bool:
        """Whether a text is hashed in a few microseconds."""
        return self._compiled is not None

    def hash_ids(self, prompt: Sequence[int], output: Sequence[int]) -> tuple[list[int], list[int], Hashing]:
        """Return the hashes of the token ids of a prompt and its output, and how they were made."""
        return self._of_ids(prompt), self._of_ids(output), self.of_tokens

    def hash_text(self, prompt: str, output: str) -> tuple[list[int], list[int], Hashing]:
        """Return the hashes of a prompt and its output, and how they were made."""
        return self._of_text(prompt), self._of_text(output), self.of_texts

    def pack(self, *texts: str) -> list[str]:
        """Return the hashes of texts, packed."""
        if self._compiled is not None:
            return self._compiled.pack(texts, self._digest)
        return [pack(self._of_text(text)) for text in texts]

    def pack_ids(self, *ids: Sequence[int]) -> list[str]:
        """Return the hashes of token ids, packed."""
        return [pack(self._of_ids(each)) for each in ids]

    def _of_text(self, text: str) -> list[int]:
        if self._tokenizer is not None:
            encoded = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)  # releases the GIL
            return self._of_ids(encoded[0].ids)
        return [self._hash(unit) for unit in cut(text)]

    def _of_ids(self, ids: Iterable[int]) -> list[int]:
        return [self._hash(b"%d" % token_id) for token_id in ids]

    def _digest(self, unit: bytes) -> int:
        return int.from_bytes(blake2b(unit, key=self._key, digest_size=8).digest()[: UNIT_BITS // 8], "big")


def _compiled_cache() -> HashCache | None:
    """Return the cache of the compiled extension; None if it was not built."""
    try:
        from gateway.rooms.recorder._units import HashCache
    except ImportError:
        return None
    return HashCache(KINDS, os.urandom(32))


def _load(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    # The library raises plain exceptions from Rust for any defect of the file.
    try:
        return Tokenizer.from_str(read_text(file, _MOST_BYTES))
    except Exception as error:  # noqa: BLE001
        raise ValueError(f"{file}: {error}") from None
