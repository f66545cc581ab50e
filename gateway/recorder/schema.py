"""The schema of a record: its version, and how texts are hashed in it."""

from __future__ import annotations

from dataclasses import dataclass

VERSION = 3
"""Of the schema (docs/trace.md). It goes up when a reader of the version before would misread a record."""


@dataclass(frozen=True, slots=True)
class Hashing:
    """How the text of a request was hashed; two records are comparable if all of this agrees.

    Parameters
    ----------
    unit
        `token`, or `piece` (a word, number or mark) where the gateway had no tokenizer.
    ngram
        Units that each hash stands for: the one at its place and the `ngram - 1` before it.
    salt
        Eight hex digits by which salts can be told apart; the salt cannot be worked out from them.
    """

    unit: str = "token"
    ngram: int = 1
    salt: str = ""
