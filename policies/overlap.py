"""How much a text repeats itself: the sign that lookup drafting (n-gram, suffix) may find its drafts in the prompt."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

WINDOW = 512
"""Units (words or token ids) looked at, the last of the prompt: what bounds the cost of a long prompt."""


def repeated_share(units: Sequence[Hashable], window: int = WINDOW) -> float:
    """Return the share of 3-grams that occur earlier among the same units, 0 to 1.

    Parameters
    ----------
    units
        The words or the token ids of a text, in order; only the last `window` of them count.

    Notes
    -----
    Each distinct 3-gram is new once and a repetition ever after, so the share is one minus distinct over all, and one
    set of tuples tells it. `python -m benchmarks.describe` times this against the alternatives that were tried.
    """
    tail = units[-window:]
    total = len(tail) - 2
    if total < 1:
        return 0.0
    return 1.0 - len(set(zip(tail, tail[1:], tail[2:], strict=False))) / total
