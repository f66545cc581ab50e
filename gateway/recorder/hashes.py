"""Salted hashes that stand for a text: enough to tell where it repeats itself or another, and no more than that."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from policies.trace import Hashing

if TYPE_CHECKING:
    from tokenizers import Tokenizer

HASH_BITS = 52
"""What a number of JSON carries exactly wherever it is read; two of a million units collide with odds of 1 to 9,000."""

_MOST_REMEMBERED = 1 << 18
# Words, numbers of up to three digits and marks with the blank before them: about what a vocabulary's pieces are.
_PIECE = re.compile(r" ?[^\W\d]+| ?\d{1,3}| ?[^\w\s]+|\s+")


class TextHasher:
    """Turns texts into hashes.

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
        self._known: dict[tuple[int | str, ...], int] = {}
        self._salt_name = blake2b(b"name of the salt", key=self._key, digest_size=4).hexdigest()

    def hash_ids(self, prompt: Sequence[int], output: Sequence[int]) -> tuple[list[int], list[int], Hashing]:
        """Return the hashes of a prompt and its output that came as token ids, and how they were made."""
        return (*self._hash(prompt, output), self._how("token"))

    def hash_text(self, prompt: str, output: str) -> tuple[list[int], list[int], Hashing]:
        """Return the hashes of a prompt and its output, and how they were made."""
        if self._tokenizer is not None:
            ids = [self._tokenizer.encode(text, add_special_tokens=False).ids for text in (prompt, output)]
            return (*self._hash(*ids), self._how("token"))
        return (*self._hash(_PIECE.findall(prompt), _PIECE.findall(output)), self._how("piece"))

    def _how(self, unit: str) -> Hashing:
        return Hashing(unit, self._ngram, self._salt_name)

    def _hash(self, prompt: Sequence[int | str], output: Sequence[int | str]) -> tuple[list[int], list[int]]:
        # One text: the first n-grams of the output begin in the prompt.
        units = [*prompt, *output]
        grams: Iterable[tuple[int | str, ...]]
        grams = zip(units, strict=False) if self._ngram == 1 else self._grams(units)
        known = self._known
        hashes = [known.get(gram) or self._of(gram) for gram in grams]
        return hashes[: len(prompt)], hashes[len(prompt) :]

    def _grams(self, units: list[int | str]) -> Iterable[tuple[int | str, ...]]:
        return (tuple(units[max(0, end - self._ngram) : end]) for end in range(1, len(units) + 1))

    def _of(self, gram: tuple[int | str, ...]) -> int:
        if len(self._known) >= _MOST_REMEMBERED:
            self._known.clear()
        text = "\0".join(map(str, gram)).encode("utf-8", "surrogatepass")
        digest = blake2b(text, key=self._key, digest_size=8).digest()
        made = self._known[gram] = int.from_bytes(digest, "big") >> (64 - HASH_BITS)
        return made


def _load(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    # The library raises bare exceptions from Rust for whatever is wrong with the file.
    try:
        return Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # noqa: BLE001
        raise ValueError(f"{file}: {error}") from None
