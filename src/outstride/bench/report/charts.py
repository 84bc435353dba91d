"""Plots as SVG text: lines, bars, a shaded table, and points with a Pareto front.

Colours are classes of the page's style sheet, so that a plot follows the light or dark theme. Every
mark has a title, which browsers show on hover.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

COLOURS = 8
"""Number of series colours in the style sheet."""
WIDTH = 720


def line(x: float, y: float, to_x: float, to_y: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"/>'


def text(x: float, y: float, content: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(content)}</text>'


def dot(x: float, y: float, radius: float, kind: str, title: str) -> str:
    label = f"<title>{escape(title)}</title>"
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}">{label}</circle>'


def box(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    label = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" '
        f'height="{height:.1f}" rx="3">{label}</rect>'
    )


def svg(width: float, height: float, parts: Sequence[str], title: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(title)}" '
        f'style="max-width:{width:.0f}px">' + "".join(parts) + "</svg>"
    )


def steps(low: float, high: float, *, log: bool = False, count: int = 5) -> list[float]:
    """Round values between two bounds: 1, 2 and 5 times powers of ten."""
    if log:
        found = [
            factor * 10.0**power
            for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            for factor in (1, 2, 5)
        ]
        return [value for value in found if low * 0.999 <= value <= high * 1.001]
    rough = max(high - low, 1e-9) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale from values to coordinates."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


@dataclass(slots=True)
class Plot:
    """A frame with two axes."""

    x_label: str
    y_label: str
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    x_log: bool = False
    y_log: bool = False
    x_marks: Sequence[float] | None = None
    width: float = WIDTH
    height: float = 340
    right: float = 150
    """Space for names right of the lines."""
    parts: list[str] = field(default_factory=list)
    x: Axis = field(init=False)
    y: Axis = field(init=False)

    def __post_init__(self) -> None:
        left, top, bottom = 56, 30, self.height - 46
        self.x = Axis(*self.x_range, left, self.width - self.right, self.x_log)
        self.y = Axis(*self.y_range, bottom, top, self.y_log)
        for value in self.x_marks or steps(*self.x_range, log=self.x_log):
            at = self.x.at(value)
            self.parts.append(line(at, top, at, bottom, "grid"))
            self.parts.append(text(at, bottom + 17, f"{value:g}", "soft mid"))
        for value in steps(*self.y_range, log=self.y_log):
            at = self.y.at(value)
            self.parts.append(line(left, at, self.width - self.right, at, "grid"))
            self.parts.append(text(left - 8, at + 4, f"{value:g}", "soft end"))
        middle = (left + self.width - self.right) / 2
        self.parts.append(text(middle, self.height - 8, self.x_label, "soft mid"))
        self.parts.append(text(left - 46, 16, self.y_label, "soft"))

    def curve(self, points: Sequence[tuple[float, float]], kind: str, label: str) -> None:
        """A line with its points."""
        places = [(self.x.at(x), self.y.at(y)) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        self.parts.append(f'<polyline class="line {kind}" points="{path}"/>')
        for (x, y), (a, b) in zip(places, points, strict=True):
            self.parts.append(dot(x, y, 4, kind, f"{label}: {b:.4g} at {a:g}"))

    def names(self, ends: Sequence[tuple[float, str, str]]) -> None:
        """Names at the lines' ends (value, name, colour), moved apart where they would overlap."""
        placed: list[float] = []
        for value, name, kind in sorted(ends, key=lambda end: self.y.at(end[0])):
            y = max(self.y.at(value), placed[-1] + 15 if placed else 0.0)
            placed.append(y)
            x = self.width - self.right + 10
            self.parts.append(dot(x + 3, y, 4, kind, name))
            self.parts.append(text(x + 12, y + 4, name))

    def draw(self, title: str) -> str:
        return svg(self.width, self.height, self.parts, title)


def colour(number: int) -> str:
    return f"c{number % COLOURS}"


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_log: bool = False,
    y_log: bool = False,
    mark: float | None = None,
    right: float = 170,
    palette: Sequence[str] = (),
) -> str:
    """One line for each series; `mark` is a value to compare with.

    `palette` has the names in the order of their colours, so that plots agree on them.
    """
    order = list(dict.fromkeys([*palette, *series]))
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points] + ([mark] if mark else [])
    y_range = (min(ys) / 1.25, max(ys) * 1.25) if y_log else (0.0, max(ys) * 1.12)
    pad = 1.08 if x_log else 0.0
    x_range = (min(xs) / pad, max(xs) * pad) if x_log else (0.0, max(xs) * 1.04)
    plot = Plot(
        x_label,
        y_label,
        x_range if x_range[0] < x_range[1] else (x_range[0], x_range[0] + 1),
        y_range,
        x_log,
        y_log,
        x_marks=sorted(set(xs)) if x_log else None,
        right=right,
    )
    if mark is not None:
        at = plot.y.at(mark)
        plot.parts.append(line(56, at, plot.width - right, at, "mark"))
    kinds = {name: colour(order.index(name)) for name in series}
    for name, points in series.items():
        plot.curve(points, kinds[name], name)
    plot.names([(points[-1][1], name, kinds[name]) for name, points in series.items()])
    return plot.draw(title)


def bars(
    groups: Mapping[str, Mapping[str, float]],
    *,
    title: str,
    unit: str,
    digits: int = 0,
    palette: Sequence[str] = (),
) -> str:
    """Horizontal bars by group; a name has the same colour in all groups."""
    names = list(dict.fromkeys([*palette, *(name for mine in groups.values() for name in mine)]))
    maximum = max(value for mine in groups.values() for value in mine.values())
    left, y = 200.0, 8.0
    axis = Axis(0, maximum, left, WIDTH - 70)
    parts: list[str] = []
    for group, mine in groups.items():
        parts.append(text(0, y + 12, group, "name"))
        y += 22
        for name, value in sorted(mine.items(), key=lambda item: -item[1]):
            label = f"{name}: {value:.{digits}f} {unit}"
            parts.append(text(left - 10, y + 14, name, "end"))
            parts.append(
                box(left, y + 2, axis.at(value) - left, 16, colour(names.index(name)), label)
            )
            parts.append(text(axis.at(value) + 6, y + 14, f"{value:.{digits}f}", "soft"))
            y += 22
        y += 10
    return svg(WIDTH, y, parts, title)


def shaded(
    rows: Mapping[str, Mapping[str, float]], columns: Sequence[str], *, title: str, best: float
) -> str:
    """A table whose cells are darker for larger values; 1 has no shade."""
    left, cell, height = 210.0, 76.0, 30.0
    width = left + cell * len(columns)
    parts = [text(left + cell * (i + 0.5), 16, name, "soft mid") for i, name in enumerate(columns)]
    for number, (name, mine) in enumerate(rows.items()):
        y = 24 + height * number
        parts.append(text(left - 10, y + 20, name, "end"))
        for i, column in enumerate(columns):
            value = mine.get(column)
            if value is None:
                continue
            share = min(1.0, max(0.0, (value - 1) / max(best - 1, 1e-9)))
            x = left + cell * i
            parts.append(
                f'<rect class="shade" x="{x + 1:.1f}" y="{y:.1f}" width="{cell - 2:.1f}" '
                f'height="{height - 2:.1f}" rx="3" fill-opacity="{0.06 + 0.9 * share:.2f}"/>'
            )
            kind = "mid on" if share > 0.65 else "mid"
            parts.append(text(x + cell / 2, y + 19, f"{value:.2f}", kind))
    return svg(width, 30 + height * len(rows), parts, title)


@dataclass(frozen=True, slots=True)
class Point:
    """A method or policy: its speed (x) and its quality (y)."""

    name: str
    x: float
    y: float
    kind: str


def front(points: Sequence[Point]) -> list[Point]:
    """The Pareto front, from left to right: points that no other point beats in both coordinates."""
    found: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.x, -p.y)):
        if not found or point.y > found[-1].y + 1e-9:
            found.append(point)
    return found[::-1]


def scatter(points: Sequence[Point], *, title: str, x_label: str, y_label: str) -> str:
    """Points, the Pareto front, and the names of the points on it."""
    low = max(0.0, math.floor((min(p.y for p in points) - 5) / 10) * 10)
    maximum = max(p.x for p in points)
    high = max(max(p.y for p in points) + 3, low + 10)
    plot = Plot(x_label, y_label, (0.0, maximum * 1.15), (low, high), height=380, right=40)
    best = front(points)
    places = [(plot.x.at(p.x), plot.y.at(p.y)) for p in best]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    plot.parts.append(f'<polyline class="line front" points="{path}"/>')
    for point in points:
        label = f"{point.name}: {point.y:.1f} at {point.x:.2f}"
        plot.parts.append(dot(plot.x.at(point.x), plot.y.at(point.y), 5, point.kind, label))
    _label(plot, best, points)
    return plot.draw(title)


def _label(plot: Plot, best: Sequence[Point], points: Sequence[Point]) -> None:
    """Puts names next to points, where they overlap neither each other nor a point."""
    taken = [(plot.x.at(p.x) - 5, plot.y.at(p.y) - 5, 10.0, 10.0) for p in points]

    def free(x: float, y: float, width: float) -> bool:
        inside = plot.x.start <= x and x + width <= plot.width and y > 18
        return inside and not any(
            x < a + w and a < x + width and y - 11 < b + h and b < y + 2 for a, b, w, h in taken
        )

    for point in best:
        x, y, width = plot.x.at(point.x), plot.y.at(point.y), 6.6 * len(point.name)
        offers: list[tuple[float, float]] = [
            (x + dx, y + dy)
            for dy in (-9, 18, -24, 33, -39, 48, 63, 78)
            for dx in (8, -width - 8, -width / 2)
        ]
        spot = next((offer for offer in offers if free(*offer, width)), None)
        if spot is not None:
            taken.append((spot[0], spot[1] - 11, width, 13))
            plot.parts.append(text(*spot, point.name, "small"))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1) -> str:
    """An HTML table; the first `text_columns` columns are text, the others numbers."""

    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{'' if i < text_columns else ' class=num'}>{escape(cell)}</{tag}>"
            for i, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return (
        f'<div class="wide"><table><thead><tr>{cells(head, "th")}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
