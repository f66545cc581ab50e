"""A substitute for a model's tokenizer: text split into pieces of about a token each."""

from __future__ import annotations

import re

# Words with the preceding blank, in parts of up to eight letters; numbers of up to three digits; up to four punctuation
# marks; single characters in scripts without blanks between words.
_PIECE = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff]"
    r"| ?[^\W\d\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff]{1,8}"
    r"| ?\d{1,3}| ?[^\w\s]{1,4}|\s+"
)


def piece_ids(prompt: str, output: str) -> tuple[list[int], list[int]]:
    """Return an id for each piece of a prompt and of its answer; equal pieces have equal ids, counted from 1.

    `python -m benchmarks.lookup_pieces` measures how well drafting on pieces predicts drafting on tokens.

    Examples
    --------
    >>> piece_ids("to be or not", " to be")
    ([1, 2, 3, 4], [5, 2])
    """
    known: dict[str, int] = {}

    def ids(text: str) -> list[int]:
        return [known.setdefault(piece, len(known) + 1) for piece in _PIECE.findall(text)]

    return ids(prompt), ids(output)
