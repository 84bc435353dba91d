"""The plot of `bench parallel`: exact match against tokens per pass, as one SVG file.

The SVG has no dependencies and follows the browser's light or dark theme. In the large panel each
policy is a number with a legend next to it; the small panels show the same policies task by task.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from outstride.bench.parallel import ParallelReport, PolicyTotal

_STYLE = """
svg { --paper: #fff; --ink: #1c2330; --soft: #667085; --grid: #e4e7ec; --exact: #1668c7;
  --lossy: #b54708; --distribution: #0e7a4f; --on: #fff; }
@media (prefers-color-scheme: dark) { svg { --paper: #14181f; --ink: #e7eaf0; --soft: #98a2b3;
  --grid: #2d3440; --exact: #6cb2ff; --lossy: #ffb066; --distribution: #5fd3a0; --on: #14181f; } }
text { font: 12px system-ui, sans-serif; fill: var(--ink); }
.soft { fill: var(--soft); font-size: 11px; } .head { font-size: 17px; font-weight: 600; }
.name { font-weight: 600; } .end { text-anchor: end; } .mid { text-anchor: middle; }
.grid { stroke: var(--grid); } .leader { stroke: var(--soft); stroke-width: .8; }
.exact { fill: var(--exact); } .lossy { fill: var(--lossy); }
.distribution { fill: var(--distribution); }
.number { font-size: 10px; font-weight: 700; fill: var(--on); text-anchor: middle; }
"""
_KINDS = {
    "exact": "exact: the text of one token per pass",
    "distribution": "exact in distribution",
    "lossy": "lossy: may change the text",
}
_WIDTH, _MARGIN = 1000, 28
_RADIUS = 8.5
_TICK = 10


@dataclass(frozen=True, slots=True)
class _Panel:
    """A panel with its two scales."""

    left: float
    top: float
    width: float
    height: float
    max_tokens_per_pass: float
    """Tokens per pass at the right edge."""
    min_match: float
    """Exact match at the lower edge."""

    def x(self, tokens: float) -> float:
        return self.left + self.width * tokens / self.max_tokens_per_pass

    def y(self, match: float) -> float:
        return self.top + self.height * (100 - match) / (100 - self.min_match)

    def frame(self, step: float, *, marks: int) -> list[str]:
        """Grid lines with labels."""
        parts = []
        for i in range(int(self.max_tokens_per_pass / step) + 1):
            x = self.x(i * step)
            parts.append(_line(x, self.top, x, self.top + self.height, "grid"))
            parts.append(_text(x, self.top + self.height + 14, f"{i * step:g}", "soft mid"))
        for i in range(marks + 1):
            value = self.min_match + (100 - self.min_match) * i / marks
            parts.append(
                _line(self.left, self.y(value), self.left + self.width, self.y(value), "grid")
            )
            parts.append(_text(self.left - 6, self.y(value) + 4, f"{value:g}", "soft end"))
        return parts


def _line(x: float, y: float, to_x: float, to_y: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _dot(x: float, y: float, radius: float, kind: str, title: str) -> str:
    return (
        f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">'
        f"<title>{escape(title)}</title></circle>"
    )


def _apart(points: Sequence[tuple[float, float]], panel: _Panel) -> list[tuple[float, float]]:
    """The same points, moved until no two bubbles overlap."""
    places = [list(point) for point in points]
    reach = 2 * _RADIUS + 1.5
    for _ in range(400):
        still = True
        for i, one in enumerate(places):
            for j in range(i):
                other = places[j]
                dx, dy = one[0] - other[0], one[1] - other[1]
                far = math.hypot(dx, dy)
                if far >= reach:
                    continue
                still = False
                if far < 0.01:  # in the same spot: each goes its own way
                    dx, dy, far = math.cos(i + j), math.sin(i + j), 1.0
                push = (reach - min(far, reach) + 0.2) / 2
                for place, sign in ((one, 1), (other, -1)):
                    place[0] += sign * push * dx / far
                    place[1] += sign * push * dy / far
        for place in places:
            place[0] = min(max(place[0], panel.left), panel.left + panel.width)
            place[1] = min(max(place[1], panel.top - 12), panel.top + panel.height)
        if still:
            break
    return [(x, y) for x, y in places]


def _main(totals: Sequence[PolicyTotal], panel: _Panel) -> list[str]:
    """Every policy as a numbered bubble; a line connects a moved bubble with its true place."""
    parts = panel.frame(
        _step(panel.max_tokens_per_pass), marks=round((100 - panel.min_match) / _TICK)
    )
    parts.append(_text(panel.left, panel.top - 22, "Mean over all tasks: exact match, %", "name"))
    parts.append(
        _text(
            panel.left + panel.width / 2,
            panel.top + panel.height + 32,
            "tokens per pass",
            "soft mid",
        )
    )
    true = [(panel.x(t.tokens_per_pass), panel.y(t.match)) for t in totals]
    moved = _apart(true, panel)
    for (x, y), (to_x, to_y), total in zip(true, moved, totals, strict=True):
        if math.hypot(to_x - x, to_y - y) > 2:
            parts.append(_line(x, y, to_x, to_y, "leader"))
            parts.append(_dot(x, y, 2, total.exactness, total.policy))
    for number, ((x, y), total) in enumerate(zip(moved, totals, strict=True), start=1):
        title = f"{total.policy}: {total.match:.1f}%, {total.tokens_per_pass:.2f} tokens per pass"
        parts.append(_dot(x, y, _RADIUS, total.exactness, title))
        parts.append(_text(x, y + 3.5, str(number), "number"))
    return parts


def _legend(totals: Sequence[PolicyTotal], left: float, top: float) -> list[str]:
    columns = ((300, "exact match"), (372, "tokens/pass"), (440, "x fewer"))
    parts = [_text(left + at, top - 4, name, "soft end") for at, name in columns]
    for number, total in enumerate(totals, start=1):
        y = top + 18 * number - 2
        parts.append(_dot(left + 8, y - 4, _RADIUS, total.exactness, total.policy))
        parts.append(_text(left + 8, y - 0.5, str(number), "number"))
        parts.append(_text(left + 24, y, total.policy))
        figures = (f"{total.match:.1f}", f"{total.tokens_per_pass:.2f}", f"{total.fewer:.2f}")
        for (at, _), figure in zip(columns, figures, strict=True):
            parts.append(_text(left + at, y, figure, "end"))
    y = top + 18 * len(totals) + 22
    for kind in dict.fromkeys(total.exactness for total in totals):
        parts += [_dot(left + 8, y - 4, 5, kind, kind), _text(left + 24, y, _KINDS[kind], "soft")]
        y += 17
    return parts


def _dots(
    report: ParallelReport, totals: Sequence[PolicyTotal], task: str, panel: _Panel
) -> list[str]:
    """A task's policies as dots; isolated dots are labelled with their numbers."""
    parts: list[str] = []
    spots: dict[tuple[int, int], list[int]] = {}
    for number, total in enumerate(totals, start=1):
        line = report.lines[total.policy, task]
        x, y = panel.x(line.tokens_per_pass), panel.y(line.match)
        title = f"{total.policy}: {line.match:.1f}%, {line.tokens_per_pass:.2f} tokens per pass"
        parts.append(_dot(x, y, 4, total.exactness, title))
        near = (s for s in spots if abs(s[0] - x) < 14 and abs(s[1] - y) < 9)
        spots.setdefault(next(near, (round(x), round(y))), []).append(number)
    for (x, y), numbers in spots.items():
        if len(numbers) <= 3 and y > panel.top + 9:  # at the top, all is well with everybody
            parts.append(_text(x + 6, y + 3, ", ".join(map(str, numbers)), "soft"))
    return parts


def _step(max_value: float) -> float:
    return 1 if max_value <= 8 else 2 if max_value <= 16 else 4


def svg(report: ParallelReport, title: str) -> str:
    """The whole SVG."""
    totals = report.totals()
    min_match = max(0.0, min(t.match for t in totals) // _TICK * _TICK - _TICK)
    max_tokens_per_pass = math.ceil(max(t.tokens_per_pass for t in totals) + 0.3)
    main = _Panel(62, 108, 430, max(300.0, 18.0 * len(totals)), max_tokens_per_pass, min_match)
    per_row = 5
    width = (_WIDTH - 2 * _MARGIN) / per_row
    top = main.top + main.height + 84
    rows = -(-len(report.measured) // per_row)
    parts = [
        _text(_MARGIN, 36, title, "head"),
        _text(_MARGIN, 56, "Up and to the right is better.", "soft"),
        *_main(totals, main),
        *_legend(totals, 535, main.top),
    ]
    widest = math.ceil(max(line.tokens_per_pass for line in report.lines.values()) + 0.3)
    for i, task in enumerate(report.measured):
        left, here = _MARGIN + 30 + width * (i % per_row), top + 180 * (i // per_row)
        panel = _Panel(left, here, width - 46, 110, widest, 0)
        parts.append(_text(left, here - 10, task, "name"))
        parts += panel.frame(4 if widest > 8 else 2, marks=2)
        parts += _dots(report, totals, task, panel)
    height = top + 180 * rows
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" role="img">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>"
        f'<rect width="{_WIDTH}" height="{height:.0f}" fill="var(--paper)"/>'
        + "\n".join(parts)
        + "</svg>\n"
    )
