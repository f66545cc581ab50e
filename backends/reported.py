"""Values that replicas, clients and other gateways report: numbers must be within bounds, texts are escaped."""

from __future__ import annotations

from typing import Final

MOST_COUNT: Final = 1 << 53
"""Largest value of a counter: beyond it, Prometheus's floating point numbers cannot count."""

MOST_CONTEXT_TOKENS: Final = 1 << 24
"""Longest plausible context of a replica, in tokens."""


def whole(value: object, most: int) -> int | None:
    """Return an integer from 0 to `most`; None for anything else.

    Examples
    --------
    >>> whole(7, 10), whole(11, 10), whole(-1, 10), whole(True, 10), whole(7.0, 10)
    (7, None, None, None, None)
    """
    return value if type(value) is int and 0 <= value <= most else None


def finite(value: object, most: float, least: float = 0.0) -> float | None:
    """Return a number from `least` to `most`; None for anything else.

    Examples
    --------
    >>> finite(2, 10.0), finite(float("nan"), 10.0), finite(10**400, 10.0)
    (2.0, None, None)
    """
    # Each call would build `int | float`. Comparisons with NaN are false, those with a huge integer exact.
    if isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most:
        return float(value)
    return None


def printable(text: str) -> str:
    r"""Escape what controls a terminal or ends the line in a text.

    Examples
    --------
    >>> printable("0.32\x1b[2J\n")
    '0.32\\x1b[2J\\n'
    """
    if text.isprintable():
        return text
    return "".join([each if each.isprintable() else each.encode("unicode_escape").decode() for each in text])
