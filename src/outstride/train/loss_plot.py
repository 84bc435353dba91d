"""The plot of a training: loss and held-out tokens per pass, by step."""

from __future__ import annotations

from collections.abc import Sequence

_WIDTH, _HEIGHT = 720, 200
_LEFT, _TOP, _GAP = 64, 36, 56
_POINTS = 360
"""Largest number of points of a curve, each the mean of a range of steps."""
Point = tuple[float, float]


def loss_plot(losses: Sequence[float], measured: Sequence[Point], name: str) -> str:
    """An SVG with two panels, one above the other."""
    panels = [("loss", _means(losses), False), ("tokens per pass, held-out texts", measured, True)]
    last = max([len(losses), 1, *(int(x) for x, _ in measured)])
    height = _TOP + len(panels) * (_HEIGHT + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 24} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="white"/><text x="{_LEFT}" y="20" '
        f'font-size="14">{_escaped(name)}</text>',
    ]
    for i, (title, points, dots) in enumerate(panels):
        parts += _panel(title, points, last, _TOP + i * (_HEIGHT + _GAP), dots=dots)
    return "\n".join([*parts, "</svg>", ""])


def _means(losses: Sequence[float]) -> list[Point]:
    size = max(1, -(-len(losses) // _POINTS))
    parts = [losses[i : i + size] for i in range(0, len(losses), size)]
    return [(min((i + 1) * size, len(losses)), sum(p) / len(p)) for i, p in enumerate(parts)]


def _panel(title: str, points: Sequence[Point], last: int, top: int, *, dots: bool) -> list[str]:
    low = min((y for _, y in points), default=0.0)
    high = max((y for _, y in points), default=1.0)
    margin = 0.05 * (high - low) or 0.5
    low, high = low - margin, high + margin

    def place(x: float, y: float) -> tuple[float, float]:
        down = top + _HEIGHT * (1.0 - (y - low) / (high - low))
        return round(_LEFT + _WIDTH * x / last, 1), round(down, 1)

    parts = [
        f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#888"/>',
        f'<text x="{_LEFT + 8}" y="{top + 16}">{_escaped(title)}</text>',
    ]
    for share in (0.0, 0.5, 1.0):
        _, y = place(0, value := low + share * (high - low))
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{value:.3g}</text>')
        x, _ = place(step := round(share * last), low)
        parts.append(f'<text x="{x}" y="{top + _HEIGHT + 16}" text-anchor="middle">{step}</text>')
    placed = [place(x, y) for x, y in points]
    line = " ".join(f"{x},{y}" for x, y in placed)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#1f5fa8" stroke-width="1.5"/>')
    if dots:
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="#1f5fa8"/>' for x, y in placed]
    return parts


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
