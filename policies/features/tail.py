"""How much a prompt repeats itself, which indicates how well n-gram and suffix drafting will do on it."""

from __future__ import annotations

import re
from array import array
from typing import Final

import numpy as np

# Each match starts at a line feed, which is found at memchr speed, so the cost grows with the number of lines. No
# alternative can backtrack over a run of blanks, whatever a client sends.
_CODE_LINE = re.compile(
    r"""
    \n(?:
        (?:\ \ |\t)[ \t]*+(?![-*+\u2022\n]|\d++[.)]|\Z)         # indented, but not a list item
      | (?:def|class|import|from|return|async|export|public|private|protected|static|const|let|var|function|func|fn|pub
          |impl|struct|enum|package|using|namespace|typedef|template|interface|void|SELECT|INSERT|CREATE)\b
      | (?:\#include|\#define|\#!|//|/\*|@\w|>>>\ )              # starts only code
      | [)\]}]                                                  # a closing bracket
    )
    """,
    re.VERBOSE,
)


def code_share(text: str) -> float:
    """Return the share of a text's non-empty lines that begin like source code, 0 to 1.

    Code fences are ignored: the text may be the end of a longer one, so its first fence may close or open a block.
    """
    return _share(text)


def share_by_expression(text: str) -> float:
    """Return the same as `code_share`, computed in Python."""
    lines = len(list(filter(None, text.split("\n"))))
    return min(1.0, len(_CODE_LINE.findall("\n" + text)) / lines) if lines else 0.0


try:
    from policies.features._tail import code_share as _share  # exists in a compiled build
except ImportError:
    _share = share_by_expression


WINDOW_BYTES: Final = 1024
"""Bytes considered at the end of the prompt (about 250 tokens of text, or 256 token ids), which bounds the cost."""

_RUN_BYTES: Final = 16  # about three words, or four tokens
_ID_BYTES: Final = 4
_RUN_IDS: Final = 3
_MIX = np.uint64(0x9E3779B97F4A7C15)  # odd, so multiplication modulo 2**64 is invertible


def overlap_of_text(text: str) -> float:
    """Return the share of 16-byte runs that occur earlier in the last `WINDOW_BYTES` bytes of a text, 0 to 1."""
    raw = text[-WINDOW_BYTES:].encode("utf-8", "surrogatepass")
    return _repeated_share(raw if len(raw) <= WINDOW_BYTES else raw[-WINDOW_BYTES:], 1, _RUN_BYTES)


def overlap_of_ids(ids: list[int]) -> float:
    """Return the share of 3-grams that occur earlier in the last 256 token ids, 0 to 1; 0 if the ids are invalid."""
    try:
        raw = array("I", ids[-(WINDOW_BYTES // _ID_BYTES) :]).tobytes()
    except (TypeError, OverflowError):
        return 0.0
    return _repeated_share(raw, _ID_BYTES, _ID_BYTES * _RUN_IDS)


def share_by_sorting(raw: bytes, unit_bytes: int, run_bytes: int) -> float:
    """Return the share of runs that occur earlier; a run starts at each unit and is 8 to 16 bytes long.

    Each distinct run is new once and repeated ever after, so the share is the number of equal neighbours after sorting,
    over the number of runs. For sorting, the first and last 8 bytes of a run (which may overlap) are hashed into one
    64-bit number.
    """
    total = (len(raw) - run_bytes) // unit_bytes + 1
    if total < 2:
        return 0.0
    first = np.ndarray((total,), np.uint64, raw, 0, (unit_bytes,))  # an overlapping view: no copy
    last = np.ndarray((total,), np.uint64, raw, run_bytes - 8, (unit_bytes,))
    runs = first * _MIX
    runs ^= last
    runs.sort()
    return int(np.count_nonzero(runs[1:] == runs[:-1])) / total


try:
    from policies.features._tail import repeated_share as _repeated_share  # exists in a compiled build
except ImportError:
    _repeated_share = share_by_sorting
