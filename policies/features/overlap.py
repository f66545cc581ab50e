"""How much a prompt repeats itself: the sign that lookup drafting (n-gram, suffix) may find its drafts in it."""

from __future__ import annotations

from array import array

import numpy as np

WINDOW_BYTES = 1024
"""Bytes looked at, the last of the prompt: some 250 tokens of text, 256 token ids. It bounds the cost."""

_RUN_BYTES = 16  # some three words, or four tokens
_ID_BYTES = 4
_RUN_IDS = 3
_MIX = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplying by it loses nothing


def overlap_of_text(text: str) -> float:
    """Return the share of runs of 16 bytes that occur earlier among the last `WINDOW_BYTES` of a text, 0 to 1."""
    raw = text[-WINDOW_BYTES:].encode("utf-8", "surrogatepass")
    return _repeated_share(raw[-WINDOW_BYTES:], 1, _RUN_BYTES)


def overlap_of_ids(ids: list[int]) -> float:
    """Return the share of 3-grams that occur earlier among the last 256 token ids, 0 to 1; 0 where they are no ids."""
    try:
        raw = array("I", ids[-(WINDOW_BYTES // _ID_BYTES) :]).tobytes()
    except (TypeError, OverflowError):
        return 0.0
    return _repeated_share(raw, _ID_BYTES, _ID_BYTES * _RUN_IDS)


def share_by_sorting(raw: bytes, unit_bytes: int, run_bytes: int) -> float:
    """Return the share of runs that occur earlier; a run begins at each unit and is 8 to 16 bytes long.

    Each distinct run is new once and a repetition ever after, so the share is one minus distinct over all: sorted, a
    repetition stands beside its like. The two numbers of 8 bytes that a run consists of (they may share some) are mixed
    into one for that; that two unlike runs become the same number is as likely as in any hash of 64 bits.
    """
    total = (len(raw) - run_bytes) // unit_bytes + 1
    if total < 2:
        return 0.0
    first = np.ndarray((total,), np.uint64, raw, 0, (unit_bytes,))  # overlapping views of the same bytes: no copy
    last = np.ndarray((total,), np.uint64, raw, run_bytes - 8, (unit_bytes,))
    runs = first * _MIX
    runs ^= last
    runs.sort()
    return int(np.count_nonzero(runs[1:] == runs[:-1])) / total


try:
    from policies.features._tail import repeated_share as _repeated_share  # where the gateway was built compiled
except ImportError:
    _repeated_share = share_by_sorting
