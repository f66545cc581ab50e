"""Reads numbers in the bodies of requests, where values may have any type."""

from __future__ import annotations

import math
from typing import Final

LARGEST: Final = 2**31 - 1


def number(value: object) -> float | None:
    """Return a finite number, even from a string, as vLLM's validation does; else None."""
    if value is None:
        return None
    if isinstance(value, float):
        found = value
    elif isinstance(value, int) or (isinstance(value, str) and len(value) <= 32):
        try:
            found = float(value)
        except (ValueError, OverflowError):
            return None
    else:
        return None
    return None if math.isnan(found) or math.isinf(found) else found


def count(value: object) -> int | None:
    """Return a number as a nonnegative 32-bit integer; None if it is no number."""
    found = number(value)
    if found is None:
        return None
    return LARGEST if found > LARGEST else int(found) if found > 0.0 else 0
