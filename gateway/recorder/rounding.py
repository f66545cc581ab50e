"""Numbers as records tell them: to a millionth."""

from __future__ import annotations

_MILLION = 1e6


def micro(value: float) -> float:
    """Return a number rounded to a millionth; `round` takes ten times as long."""
    return int(value * _MILLION + 0.5) / _MILLION if 0.0 <= value < 1e9 * 9 else round(value, 6)
