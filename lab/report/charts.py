"""Bar and line charts as SVG text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 500, 290
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 18, 14, 44
_ROW = 30
_MAX_TICKS = 8
_DASHES = ("", "6 4", "2 4", "10 4 2 4", "14 5", "1 7")
_CHARACTER = 6.7  # mean width of a character of a label, in pixels


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar; `low` and `high` are the ends of its interval, None without one."""

    label: str
    color: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """One line through `points`, each (x, y); `dash` is the number of a dash pattern, 0 for a solid line."""

    label: str
    color: str
    points: Sequence[tuple[float, float]]
    dash: int = 0


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis with a label; `at` sets the ticks, `span` the ends, `logarithmic` requires values above 0."""

    label: str
    logarithmic: bool = False
    from_zero: bool = False
    at: Sequence[float] | None = None
    span: tuple[float, float] | None = None


class _Scale:
    """Maps values to pixels."""

    def __init__(self, values: Sequence[float], axis: Axis, first_px: float, last_px: float) -> None:
        low, high = axis.span or (min(values), max(values))
        self._log = axis.logarithmic and low > 0
        if axis.from_zero and not self._log:
            low = min(low, 0.0)
        if high <= low:
            low, high = (low / 1.5, high * 1.5) if self._log else (low - 0.5, high + 0.5)
        self.ticks = [t for t in axis.at if low <= t <= high] if axis.at else _ticks(low, high, logarithmic=self._log)
        if not axis.at and not self._log:
            step = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else 1.0
            high = max(high, math.ceil(high / step - 1e-9) * step)
            low = min(low, math.floor(low / step + 1e-9) * step)
            self.ticks = _ticks(low, high, logarithmic=False)
        self._low, self._high = self._move(low), self._move(high)
        self._first_px, self._last_px = first_px, last_px

    def __call__(self, value: float) -> float:
        share = (self._move(value) - self._low) / (self._high - self._low)
        return self._first_px + share * (self._last_px - self._first_px)

    def _move(self, value: float) -> float:
        return math.log10(value) if self._log else value


def bar_chart(bars: Sequence[Bar], reference: float | None = 1.0) -> str:
    """Draw horizontal bars from 0 with intervals as whiskers, and a dashed line at `reference`.

    Examples
    --------
    >>> bar_chart([Bar("eagle3", "#0072b2", 1.5, 1.4, 1.6)])[:4]
    '<svg'
    """
    left = min(200.0, 14 + _CHARACTER * max(len(bar.label) for bar in bars))
    right = 48
    height = _ROW * len(bars) + 34
    ends = [value for bar in bars for value in (bar.value, bar.high) if value is not None]
    scale = _Scale([0.0, *ends, reference or 0.0], Axis("", from_zero=True), left, _WIDTH - right)
    parts = [_grid_x(scale, 4, height - 26)]
    for index, bar in enumerate(bars):
        y = 8 + index * _ROW
        end = scale(bar.value)
        tooltip = f"{bar.label}: {_number(bar.value)}"
        if bar.low is not None and bar.high is not None:
            tooltip += f" ({_number(bar.low)} to {_number(bar.high)})"
        parts.append(f"<g><title>{escape(tooltip)}</title>")
        parts.append(_text(left - 8, y + 14, _shortened(bar.label, left - 14), "end", "label"))
        parts.append(
            f'<rect x="{left:.1f}" y="{y}" width="{max(1.0, end - left):.1f}" height="20" rx="3" fill="{bar.color}"/>'
        )
        label_x = end
        if bar.low is not None and bar.high is not None:
            first, last = scale(bar.low), scale(bar.high)
            caps = "".join(f"M{x:.1f} {y + 6}v8" for x in (first, last))
            parts.append(f'<path class="whisker" d="M{first:.1f} {y + 10}H{last:.1f}{caps}"/>')
            label_x = max(end, last)
        parts.append(
            _text(label_x + 6, y + 14, f"{bar.value:.2f}" if bar.value < 10 else _number(bar.value), "start", "value")
        )
        parts.append("</g>")
    if reference is not None:
        x = scale(reference)
        parts.append(f'<path class="reference" d="M{x:.1f} 4V{height - 26}"/>')
    return _svg(height, parts)


def line_chart(lines: Sequence[Line], x: Axis, y: Axis, *, markers: bool = True, reference: float | None = None) -> str:
    """Draw lines over two axes, with a mark at every point if `markers`.

    Examples
    --------
    >>> line = Line("eagle3", "#0072b2", [(1, 40.0), (4, 150.0)])
    >>> line_chart([line], Axis("load"), Axis("tokens/s")).count("<circle")
    2
    """
    xs = [point[0] for line in lines for point in line.points]
    ys = [point[1] for line in lines for point in line.points] + ([reference] if reference is not None else [])
    across = _Scale(xs, x, _LEFT, _WIDTH - _RIGHT)
    up = _Scale(ys, y, _HEIGHT - _BOTTOM, _TOP)
    parts = [_grid_x(across, _TOP, _HEIGHT - _BOTTOM), _grid_y(up)]
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, x.label, "middle", "axis"))
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    rotated = f'transform="translate(13 {middle:.0f}) rotate(-90)"'
    parts.append(f'<text class="axis" text-anchor="middle" {rotated}>{escape(y.label)}</text>')
    if reference is not None:
        parts.append(f'<path class="reference" d="M{_LEFT} {up(reference):.1f}H{_WIDTH - _RIGHT}"/>')
    for line in lines:
        path = "L".join(f"{across(px):.1f} {up(py):.1f}" for px, py in line.points)
        parts.append(
            f'<g><title>{escape(line.label)}</title><path class="line" stroke="{line.color}"{_dash(line)} d="M{path}"/>'
        )
        if markers:
            for px, py in line.points:
                tooltip = escape(f"{line.label}: {_number(py)} at {_number(px)}")
                mark = f'<circle cx="{across(px):.1f}" cy="{up(py):.1f}" r="4" fill="{line.color}">'
                parts.append(f"{mark}<title>{tooltip}</title></circle>")
        parts.append("</g>")
    return _svg(_HEIGHT, parts)


def dash_sample(dash: int) -> str:
    """Draw a short sample of a dash pattern for a legend."""
    pattern = _dash(Line("", "", (), dash))
    return (
        f'<svg class="sample" viewBox="0 0 34 10"><path class="line" stroke="currentColor"{pattern} d="M1 5H33"/></svg>'
    )


def _dash(line: Line) -> str:
    return f' stroke-dasharray="{_DASHES[line.dash % len(_DASHES)]}"' if line.dash else ""


def _grid_x(scale: _Scale, top: float, bottom: float) -> str:
    return "".join(
        f'<path class="grid" d="M{scale(t):.1f} {top}V{bottom}"/>'
        f"{_text(scale(t), bottom + 15, _number(t), 'middle', 'tick')}"
        for t in scale.ticks
    )


def _grid_y(scale: _Scale) -> str:
    return "".join(
        f'<path class="grid" d="M{_LEFT} {scale(t):.1f}H{_WIDTH - _RIGHT}"/>'
        f"{_text(_LEFT - 6, scale(t) + 4, _number(t), 'end', 'tick')}"
        for t in scale.ticks
    )


def _ticks(low: float, high: float, *, logarithmic: bool) -> list[float]:
    if logarithmic:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for digits in ((1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1,)):
            ticks = [digit * 10.0**decade for decade in decades for digit in digits]
            ticks = [tick for tick in ticks if low <= tick <= high]
            if len(ticks) <= _MAX_TICKS:
                break
        return ticks
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [count * step for count in range(first, last + 1)]


def _number(value: float) -> str:
    if value and abs(value) < 0.1:
        return f"{value:.2g}"
    text = f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 100 else f"{value:,.0f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _shortened(text: str, width: float) -> str:
    fitting = int(width / _CHARACTER)
    return text if len(text) <= fitting else text[: max(1, fitting - 1)] + "…"


def _text(x: float, y: float, text: str, anchor: str, css: str) -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img">{"".join(parts)}</svg>'
