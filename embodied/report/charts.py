"""Small inline SVG charts whose colours come from the page's style sheet, so that they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 420, 220  # viewBox units, about the pixels of a phone's column
LEFT, RIGHT, TOP, BOTTOM = 50, 10, 8, 34  # margins
MAX_POINTS = 300  # of a line; more are averaged in equal groups
MAX_COLUMNS = 80  # of a heat map; likewise
COLOURS = 8  # classes c0..c7 of the style sheet; further lines are dashed
LEVELS = 20  # shades of a heat map


@dataclass(frozen=True)
class Line:
    """A named curve through points (x, y); `marked` draws them as dots too."""

    name: str
    points: Sequence[tuple[float, float]]
    marked: bool = False


@dataclass(frozen=True)
class Axis:
    """What an axis shows: label, and how many data units its printed unit has (60 for seconds shown in minutes)."""

    label: str
    unit: float = 1.0
    percent: bool = False


def line_chart(title: str, lines: Sequence[Line], x: Axis, y: Axis, level: float | None = None) -> str:
    """An SVG line chart with its legend; `level` is a horizontal dashed line. No points at all: an empty string.

    Horizontal axes begin at 0 (steps, seconds); a vertical one runs from 0 to 1 if in percent, else fits the data.
    """
    lines = [Line(line.name, thin(line.points), line.marked) for line in lines if line.points]
    if not lines:
        return ""
    xs = [point[0] for line in lines for point in line.points]
    ys = [point[1] for line in lines for point in line.points]
    frame = _Frame(*_span(0.0, max(xs)), *((0.0, 1.0) if y.percent else _span(min(ys), max(ys))))
    parts = [_axes(frame, x, y)]
    if level is not None:
        at = frame.y(level)
        parts.append(f'<path class="level" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"><title>target</title></path>')
    for index, line in enumerate(lines):
        parts.append(_curve(frame, line, index))
    legend = "".join(
        f'<span><i class="key {_style(index)}"></i>{escape(line.name)} <b>{_value(line.points[-1][1], y)}</b></span>'
        for index, line in enumerate(lines)
    )
    return _figure(title, "".join(parts), legend)


def heat_map(title: str, columns: Sequence[tuple[float, Sequence[float]]], rows: Sequence[str], x: Axis) -> str:
    """An SVG heat map of shares: columns (x, one share a row, the first at the bottom), each scaled to sum to 1.

    Empty without columns.
    """
    if not columns:
        return ""
    groups = _groups(list(columns), MAX_COLUMNS)
    means = [[sum(c[1][r] for c in group) / len(group) for r in range(len(rows))] for group in groups]
    edges = [0.0, *(group[-1][0] for group in groups)]
    frame = _Frame(0.0, max(edges[-1], 1e-9), 0.0, float(len(rows)))
    cells: dict[int, list[str]] = {}
    for index, column in enumerate(means):
        total = sum(column)
        x0, x1 = frame.x(edges[index]), frame.x(edges[index + 1])
        for row, share in enumerate(column):
            shade = round(LEVELS * share / total) if total > 0 else 0
            if shade:
                y1, height = frame.y(row + 1), frame.y(row) - frame.y(row + 1)
                overlap = 0.0 if index == len(means) - 1 else 0.7  # no seams between columns
                width = x1 - x0 + overlap
                cells.setdefault(shade, []).append(f"M{x0:.1f} {y1:.1f}h{width:.1f}v{height:.1f}h{-width:.1f}z")
    parts = [
        f'<path class="cell" style="--share:{100 * shade // LEVELS}%" d="{"".join(paths)}"/>'
        for shade, paths in sorted(cells.items())
    ]
    labels = "".join(
        f'<text class="tick" text-anchor="end" x="{LEFT - 5}" y="{frame.y(r + 0.5) + 4:.1f}">{escape(name)}</text>'
        for r, name in enumerate(rows)
    )
    frame_line = f'<rect class="axis" x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" height="{HEIGHT - TOP - BOTTOM}"/>'
    legend = '<span>share 0 % <i class="ramp"></i> 100 %</span>'
    return _figure(title, "".join(parts) + frame_line + labels + _x_axis(frame, x), legend)


def thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `MAX_POINTS` points: averages of equal groups of consecutive ones."""
    groups = _groups(list(points), MAX_POINTS)
    return [(sum(p[0] for p in g) / len(g), sum(p[1] for p in g) / len(g)) for g in groups]


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) within [low, high], about `count` of them."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def short(value: float) -> str:
    """A number for an axis or a legend, three digits: 5242880 is 5.24M, 0.0003 is 3e-4."""
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{suffix}"
    if 0.0 < abs(value) < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.3g}"


@dataclass(frozen=True)
class _Frame:
    """Maps data to viewBox units."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - self.x_low) / (self.x_high - self.x_low)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - self.y_low) / (self.y_high - self.y_low)


def _groups(items: list, most: int) -> list[list]:
    size = math.ceil(len(items) / most)
    return [items[i : i + size] for i in range(0, len(items), size)]


def _span(low: float, high: float) -> tuple[float, float]:
    """(low, high), widened where it would be empty."""
    if high > low:
        return low, high
    pad = abs(low) / 10 or 1.0
    return low - pad, high + pad


def _style(index: int) -> str:
    return f"c{index % COLOURS}" + (" dashed" if index >= COLOURS else "")


def _value(value: float, axis: Axis) -> str:
    return f"{100 * value:.1f} %" if axis.percent else short(value / axis.unit)


def _curve(frame: _Frame, line: Line, index: int) -> str:
    at = [(frame.x(px), frame.y(py)) for px, py in line.points]
    path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in at)
    curve = f'<path class="line {_style(index)}" d="{path}"><title>{escape(line.name)}</title></path>'
    if not line.marked and len(at) > 1:
        return curve
    dots = "".join(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.5"/>' for px, py in at)
    return f'{curve}<g class="dots {_style(index)}">{dots}</g>'


def _axes(frame: _Frame, x: Axis, y: Axis) -> str:
    parts = []
    for tick in ticks(frame.y_low / y.unit, frame.y_high / y.unit, 4):
        at = frame.y(tick * y.unit)
        text = f"{100 * tick:.0f} %" if y.percent else short(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{LEFT - 5}" y="{at + 4:.1f}">{text}</text>')
    return "".join(parts) + _x_axis(frame, x)


def _x_axis(frame: _Frame, x: Axis) -> str:
    base = HEIGHT - BOTTOM
    parts = [f'<path class="axis" d="M{LEFT} {base}H{WIDTH - RIGHT}"/>']
    for tick in ticks(frame.x_low / x.unit, frame.x_high / x.unit, 5):
        at = frame.x(tick * x.unit)
        anchor = "end" if at > WIDTH - RIGHT - 12 else "middle"
        parts.append(f'<text class="tick" text-anchor="{anchor}" x="{at:.1f}" y="{base + 14}">{short(tick)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="tick" text-anchor="middle" x="{middle}" y="{HEIGHT - 4}">{escape(x.label)}</text>')
    return "".join(parts)


def _figure(title: str, drawing: str, legend: str) -> str:
    name = escape(title, quote=True)
    return (
        f"<figure><figcaption>{name}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">{drawing}</svg>'
        f'<div class="legend">{legend}</div></figure>'
    )
