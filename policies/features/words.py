"""Text cut into about what a vocabulary's tokens are, where the model's own tokenizer is not at hand."""

from __future__ import annotations

import re

# Words with the blank before them and in parts of eight letters, numbers of up to three digits, marks by up to four;
# of scripts without blanks between words, single characters.
_PIECE = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff]"
    r"| ?[^\W\d\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff]{1,8}"
    r"| ?\d{1,3}| ?[^\w\s]{1,4}|\s+"
)


def piece_ids(prompt: str, output: str) -> tuple[list[int], list[int]]:
    """Return a number for each piece of a prompt and of its answer; equal pieces have equal numbers, from 1.

    How near lookups on pieces come to lookups on tokens: `python -m benchmarks.lookup_pieces`.
    """
    known: dict[str, int] = {}

    def ids(text: str) -> list[int]:
        return [known.setdefault(piece, len(known) + 1) for piece in _PIECE.findall(text)]

    return ids(prompt), ids(output)
