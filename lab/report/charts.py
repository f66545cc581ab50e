"""Lines and stacked areas as SVG text; colours are CSS values, such as `var(--s1)` of `lab.report.colors`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from lab.report.scale import Axis, Scale, grid_x, grid_y, number, text

_WIDTH, _HEIGHT = 500, 290
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 18, 14, 46
_DASHES = ("", "6 4", "2 4", "10 4 2 4", "14 5", "1 7")


@dataclass(frozen=True, slots=True)
class Line:
    """One line through `points`, each (x, y); `dash` is the number of a dash pattern, 0 for a solid line."""

    label: str
    color: str
    points: Sequence[tuple[float, float]]
    dash: int = 0


@dataclass(frozen=True, slots=True)
class Area:
    """One layer of a stack, with a share for each interval of time."""

    label: str
    color: str
    shares: Sequence[float]


def line_chart(title: str, lines: Sequence[Line], x: Axis, y: Axis) -> str:
    """Draw lines over two axes.

    Examples
    --------
    >>> line = Line("eagle3", "var(--s1)", [(1, 40.0), (4, 150.0)])
    >>> line_chart("Speed", [line], Axis("load"), Axis("tokens/s")).count('class="line"')
    1
    """
    points = [point for line in lines for point in line.points]
    across, up, parts = _axes([px for px, _ in points], [py for _, py in points], x, y)
    for line in lines:
        path = "L".join(f"{across(px):.1f} {up(py):.1f}" for px, py in line.points)
        parts.append(
            f'<g style="--c:{line.color}"><title>{escape(line.label)}</title>'
            f'<path class="line"{_dash(line.dash)} d="M{path}"/></g>'
        )
    return _svg(title, _HEIGHT, parts)


def area_chart(title: str, areas: Sequence[Area], edges: Sequence[float], x: Axis) -> str:
    """Draw shares over time as a stack of steps, the first layer at the bottom.

    Examples
    --------
    >>> area_chart("Choices", [Area("a", "var(--s1)", [0.5, 1.0])], [0, 1, 2], Axis("s")).count("<title>a: 50%")
    1
    """
    across, up, parts = _axes(
        list(edges), [0.0, 100.0], x, Axis("% of requests", at=(0, 25, 50, 75, 100), span=(0, 100))
    )
    below = [0.0] * (len(edges) - 1)
    for area in areas:
        rectangles, edge = [], []
        for index, share in enumerate(area.shares):
            if share > 0:
                left, right = across(edges[index]), across(edges[index + 1])
                top, bottom = up(100 * (below[index] + share)), up(100 * below[index])
                tooltip = escape(f"{area.label}: {share:.0%} at {number(edges[index])}")
                edge.append(f"M{left:.1f} {top:.1f}H{right:.1f}")
                rectangles.append(
                    f'<rect class="layer" x="{left:.1f}" y="{top:.1f}" width="{right - left + 0.3:.1f}" '
                    f'height="{bottom - top:.1f}"><title>{tooltip}</title></rect>'
                )
                below[index] += share
        layer = "".join(rectangles) + f'<path class="edge" d="{"".join(edge)}"/>'
        parts.append(f'<g style="--c:{area.color}">{layer}</g>')
    return _svg(title, _HEIGHT, parts)


def swatch(color: str, *, dash: int | None = None) -> str:
    """Draw a sample of a colour for a legend: a short line of a dash pattern, or a square without one."""
    if dash is None:
        return (
            f'<svg class="sample" style="--c:{color}" viewBox="0 0 12 12" aria-hidden="true">'
            '<rect class="layer" x="0" y="0" width="12" height="12"/></svg>'
        )
    return (
        f'<svg class="sample wide" style="--c:{color}" viewBox="0 0 34 10" aria-hidden="true">'
        f'<path class="line"{_dash(dash)} d="M1 5H33"/></svg>'
    )


def _axes(xs: Sequence[float], ys: Sequence[float], x: Axis, y: Axis) -> tuple[Scale, Scale, list[str]]:
    across = Scale(xs, x, _LEFT, _WIDTH - _RIGHT)
    up = Scale(ys, y, _HEIGHT - _BOTTOM, _TOP)
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    rotated = f'transform="translate(13 {middle:.0f}) rotate(-90)"'
    return (
        across,
        up,
        [
            grid_x(across, _TOP, _HEIGHT - _BOTTOM),
            grid_y(up, _LEFT, _WIDTH - _RIGHT),
            text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, x.label, "middle", "axis"),
            f'<text class="axis" text-anchor="middle" {rotated}>{escape(y.label)}</text>',
        ],
    )


def _dash(dash: int) -> str:
    return f' stroke-dasharray="{_DASHES[dash % len(_DASHES)]}"' if dash % len(_DASHES) else ""


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    label = escape(title, quote=True)
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
