"""Line charts as SVG text; colors are CSS values, such as `var(--s1)` of the dashboard's `tokens.css`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

MAX_TICKS = 7
"""Most ticks of a logarithmic axis whose labels fit on a phone."""

_WIDTH, _HEIGHT = 500, 290
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 18, 14, 46
_DASHES = ("", "6 4", "2 4", "10 4 2 4", "14 5", "1 7")


@dataclass(frozen=True, slots=True)
class ChartLine:
    """One line through `points`, each (x, y); `dash` numbers a dash pattern, 0 for a solid line."""

    label: str
    color: str
    points: Sequence[tuple[float, float]]
    dash: int = 0


class Scale:
    """Maps values above 0 to pixels on a logarithmic axis.

    Examples
    --------
    >>> scale = Scale([0.5, 50.0], 0.0, 200.0)
    >>> scale(5.0), scale.ticks
    (100.0, [0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0])
    """

    def __init__(self, values: Sequence[float], first_px: float, last_px: float) -> None:
        low, high = min(values), max(values)
        if high <= low:
            low, high = low / 1.5, high * 1.5
        self.ticks = _logarithmic_ticks(low, high)
        self._low, self._decades = math.log10(low), math.log10(high / low)
        self._first_px, self._last_px = first_px, last_px

    def __call__(self, value: float) -> float:
        """Return the position of a value in pixels."""
        share = (math.log10(value) - self._low) / self._decades
        return self._first_px + share * (self._last_px - self._first_px)


def line_chart(title: str, lines: Sequence[ChartLine], x_label: str) -> str:
    """Draw lines of percentages over a logarithmic axis.

    Examples
    --------
    >>> line_chart("Times", [ChartLine("eagle3", "var(--s1)", [(1, 40.0), (4, 9.0)])], "seconds").count('class="line"')
    1
    """
    across = Scale([px for line in lines for px, _ in line.points], _LEFT, _WIDTH - _RIGHT)
    parts = [*_grid(across), *_labels(x_label)]
    for line in lines:
        path = "L".join(f"{across(px):.1f} {_up(py):.1f}" for px, py in line.points)
        parts.append(
            f'<g style="--c:{line.color}"><title>{escape(line.label)}</title>'
            f'<path class="line"{_dash(line.dash)} d="M{path}"/></g>'
        )
    label = escape(title, quote=True)
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _up(percent: float) -> float:
    return _HEIGHT - _BOTTOM - percent / 100 * (_HEIGHT - _BOTTOM - _TOP)


def swatch(color: str, dash: int) -> str:
    """Draw a sample of a line for a legend."""
    return (
        f'<svg class="sample" style="--c:{color}" viewBox="0 0 34 10" aria-hidden="true">'
        f'<path class="line"{_dash(dash)} d="M1 5H33"/></svg>'
    )


def _grid(across: Scale) -> list[str]:
    """Return lines at the ticks of both axes, with labels below and on the left."""
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    vertical = [
        f'<path class="grid" d="M{across(tick):.1f} {_TOP}V{bottom}"/>'
        f"{_text(across(tick), bottom + 16, _number(tick), 'middle', 'tick')}"
        for tick in across.ticks
    ]
    horizontal = [
        f'<path class="grid" d="M{_LEFT} {_up(tick):.1f}H{right}"/>'
        f"{_text(_LEFT - 6, _up(tick) + 4, f'{tick}', 'end', 'tick')}"
        for tick in (0, 25, 50, 75, 100)
    ]
    return vertical + horizontal


def _labels(x_label: str) -> list[str]:
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    rotated = f'transform="translate(13 {middle:.0f}) rotate(-90)"'
    return [
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, x_label, "middle", "axis"),
        f'<text class="axis" text-anchor="middle" {rotated}>% at or below</text>',
    ]


def _dash(dash: int) -> str:
    return f' stroke-dasharray="{_DASHES[dash % len(_DASHES)]}"' if dash % len(_DASHES) else ""


def _logarithmic_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1,)):
        ticks = [digit * 10.0**decade for decade in decades for digit in digits]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= MAX_TICKS:
            break
    return ticks


def _number(value: float) -> str:
    """Return a number with two or three significant digits."""
    if value and abs(value) < 0.1:
        return f"{value:.2g}"
    written = f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 100 else f"{value:,.0f}"
    return written.rstrip("0").rstrip(".") if "." in written else written


def _text(x: float, y: float, words: str, anchor: str, css: str) -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
