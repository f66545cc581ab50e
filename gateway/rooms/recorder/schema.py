"""The schema of records: its version, and how their texts are hashed."""

from __future__ import annotations

from dataclasses import dataclass

VERSION = 3
"""Version of the schema (docs/replay.md); raised when readers of the previous version would misread a record."""


@dataclass(frozen=True, slots=True)
class Hashing:
    """How the text of a request was hashed; hashes of two records are comparable if theirs are equal.

    Examples
    --------
    >>> Hashing("token", salt="01234567") == Hashing("token", salt="89abcdef")
    False
    """

    unit: str = "token"  # `token`, or `piece` (a word, number or mark) if the gateway had no tokenizer
    ngram: int = 1  # units per hash: a unit and the `ngram - 1` before it
    salt: str = ""  # eight hex digits that identify the salt without revealing it
