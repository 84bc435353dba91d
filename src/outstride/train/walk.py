"""How far chains of guesses get along held-out texts, as decoding would use them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from outstride.train.recipe import Measured
from outstride.train.words import Rows

_TEXTS, _ROWS = 96, 16
"""Held-out texts that are measured, and those of them at once."""


def walk(runs: torch.Tensor, starts: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
    """The positions at which a decode drafts, from before each answer to its end.

    runs: how many guesses behind each position are right. So many tokens are taken, and the target's
    own behind them, which is where the next draft begins.
    """
    visited = torch.zeros_like(runs, dtype=torch.bool)
    for row, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        jumps, at = runs[row].tolist(), start - 1
        while at < stop - 1:
            visited[row, at] = True
            at += jumps[at] + 1
    return visited


def depths(runs: torch.Tensor, room: torch.Tensor, chosen: torch.Tensor, count: int) -> list[float]:
    """How often the first 1, 2, … guesses are all right where the text has so many tokens left."""
    found = []
    for depth in range(1, count + 1):
        some = runs[chosen & (room >= depth)]
        found.append(float((some >= depth).float().mean()) if len(some) else 0.0)
    return found


def said(rows: Rows) -> torch.Tensor:
    """Where the answers are."""
    places = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)
    return (places >= rows.starts[:, None]) & (places < rows.stops[:, None])


def anchored(rows: Rows, count: int, numbers: torch.Generator) -> torch.Tensor:
    """Random positions to draft behind, spread over each answer: [rows, count]."""
    draws = torch.rand(len(rows), count, generator=numbers, device=rows.tokens.device)
    shares = (draws + torch.arange(count, device=draws.device)) / count
    anchors = rows.starts[:, None] - 1 + (shares * (rows.stops - rows.starts)[:, None]).long()
    return torch.minimum(anchors, rows.stops[:, None] - 2)


def along(
    held: Rows,
    runs_of: Callable[[Rows], torch.Tensor],
    count: int,
    overhead: float,
    figures: dict[str, float],
) -> Measured:
    """What `count` guesses at a time give on held-out texts, greedy ones if there are any.

    runs_of: how many guesses behind each position of answers are right, for some rows at a time.
    """
    greedy = held if bool(held.sampled.all()) else held.take(~held.sampled)
    greedy = greedy.take(slice(_TEXTS))
    with torch.compiler.set_stance("force_eager"):
        parts = [runs_of(greedy.take(slice(i, i + _ROWS))) for i in range(0, len(greedy), _ROWS)]
    runs, starts, stops = torch.cat(parts).cpu(), greedy.starts.cpu(), greedy.stops.cpu()
    visited = walk(runs, starts, stops)
    room = stops[:, None] - 1 - torch.arange(runs.shape[1])
    return Measured(
        tokens_per_pass=float((stops - starts).sum() / visited.sum()),
        by_depth=depths(runs, room, visited, count),
        overhead=overhead,
        figures=figures,
    )
