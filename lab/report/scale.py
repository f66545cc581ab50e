"""Axes of charts: ticks, positions and labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

MAX_TICKS = 7
"""Most ticks of an axis; on a phone, their labels still fit."""


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis with a label; `at` sets the ticks, `span` the ends, `logarithmic` requires values above 0."""

    label: str
    logarithmic: bool = False
    from_zero: bool = False
    at: Sequence[float] | None = None
    span: tuple[float, float] | None = None


class Scale:
    """Maps values to pixels.

    Examples
    --------
    >>> scale = Scale([0.0, 100.0], Axis("%"), 0.0, 200.0)
    >>> scale(25.0), scale.ticks
    (50.0, [0.0, 20.0, 40.0, 60.0, 80.0, 100.0])
    """

    def __init__(self, values: Sequence[float], axis: Axis, first_px: float, last_px: float) -> None:
        low, high = axis.span or (min(values), max(values))
        self._log = axis.logarithmic and low > 0
        if axis.from_zero and not self._log:
            low = min(low, 0.0)
        if high <= low:
            low, high = (low / 1.5, high * 1.5) if self._log else (low - 0.5, high + 0.5)
        self.ticks = [t for t in axis.at if low <= t <= high] if axis.at else _ticks(low, high, logarithmic=self._log)
        if not axis.at and not axis.span and not self._log:
            step = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else 1.0
            high = max(high, math.ceil(high / step - 1e-9) * step)
            low = min(low, math.floor(low / step + 1e-9) * step)
            self.ticks = _ticks(low, high, logarithmic=False)
        self._low, self._high = self._move(low), self._move(high)
        self._first_px, self._last_px = first_px, last_px

    def __call__(self, value: float) -> float:
        """Return the position of a value in pixels."""
        share = (self._move(value) - self._low) / (self._high - self._low)
        return self._first_px + share * (self._last_px - self._first_px)

    def _move(self, value: float) -> float:
        return math.log10(value) if self._log else value


def grid_x(scale: Scale, top: float, bottom: float) -> str:
    """Return vertical lines at the ticks, with labels below."""
    return "".join(
        f'<path class="grid" d="M{scale(t):.1f} {top}V{bottom}"/>'
        f"{text(scale(t), bottom + 16, number(t), 'middle', 'tick')}"
        for t in scale.ticks
    )


def grid_y(scale: Scale, left: float, right: float) -> str:
    """Return horizontal lines at the ticks, with labels at the left."""
    return "".join(
        f'<path class="grid" d="M{left} {scale(t):.1f}H{right}"/>'
        f"{text(left - 6, scale(t) + 4, number(t), 'end', 'tick')}"
        for t in scale.ticks
    )


def _ticks(low: float, high: float, *, logarithmic: bool) -> list[float]:
    if logarithmic:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for digits in ((1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1,)):
            ticks = [digit * 10.0**decade for decade in decades for digit in digits]
            ticks = [tick for tick in ticks if low <= tick <= high]
            if len(ticks) <= MAX_TICKS:
                break
        return ticks
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [count * step for count in range(first, last + 1)]


def number(value: float) -> str:
    """Return a number with two or three significant digits.

    Examples
    --------
    >>> number(0.0123), number(1.5), number(12345.6)
    ('0.012', '1.5', '12,346')
    """
    if value and abs(value) < 0.1:
        return f"{value:.2g}"
    written = f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 100 else f"{value:,.0f}"
    return written.rstrip("0").rstrip(".") if "." in written else written


def text(x: float, y: float, words: str, anchor: str, css: str) -> str:
    """Return a text of a drawing."""
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
