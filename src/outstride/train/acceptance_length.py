"""Acceptance length of drafted chains along held-out texts, as decoding would use them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from outstride.train.corpus_files import TrainingRows
from outstride.train.recipe import Measurement

_TEXTS, _ROWS = 96, 16
"""Held-out texts that are measured, and rows per batch."""


def visited_positions(
    num_correct: torch.Tensor, starts: torch.Tensor, stops: torch.Tensor
) -> torch.Tensor:
    """Positions at which decoding drafts, from before each answer to its end: bool [rows, length].

    num_correct: correct draft tokens after each position. Decoding accepts them plus the target's
    bonus token, after which the next draft begins.
    """
    visited = torch.zeros_like(num_correct, dtype=torch.bool)
    for row, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        jumps, at = num_correct[row].tolist(), start - 1
        while at < stop - 1:
            visited[row, at] = True
            at += jumps[at] + 1
    return visited


def rates_by_depth(
    num_correct: torch.Tensor, tokens_left: torch.Tensor, chosen: torch.Tensor, count: int
) -> list[float]:
    """How often the first 1, 2, … draft tokens are all accepted, where the text has that many tokens
    left.
    """
    found = []
    for depth in range(1, count + 1):
        some = num_correct[chosen & (tokens_left >= depth)]
        found.append(float((some >= depth).float().mean()) if len(some) else 0.0)
    return found


def answer_mask(rows: TrainingRows) -> torch.Tensor:
    """Positions of answer tokens: bool [rows, length]."""
    places = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)
    return (places >= rows.starts[:, None]) & (places < rows.stops[:, None])


def sample_anchors(rows: TrainingRows, count: int, numbers: torch.Generator) -> torch.Tensor:
    """Random positions to draft after, spread over each answer: [rows, count]."""
    draws = torch.rand(len(rows), count, generator=numbers, device=rows.tokens.device)
    shares = (draws + torch.arange(count, device=draws.device)) / count
    anchors = rows.starts[:, None] - 1 + (shares * (rows.stops - rows.starts)[:, None]).long()
    return torch.minimum(anchors, rows.stops[:, None] - 2)


def measure_chains(
    held: TrainingRows,
    count_correct: Callable[[TrainingRows], torch.Tensor],
    count: int,
    overhead: float,
    figures: dict[str, float],
) -> Measurement:
    """Measures drafts of `count` tokens on held-out texts, on greedy ones if there are any.

    count_correct: number of correct draft tokens after each position of answers, for some rows.
    """
    greedy = held if bool(held.sampled.all()) else held.take(~held.sampled)
    greedy = greedy.take(slice(_TEXTS))
    with torch.compiler.set_stance("force_eager"):
        counts = [
            count_correct(greedy.take(slice(i, i + _ROWS))) for i in range(0, len(greedy), _ROWS)
        ]
    runs, starts, stops = torch.cat(counts).cpu(), greedy.starts.cpu(), greedy.stops.cpu()
    visited = visited_positions(runs, starts, stops)
    left = stops[:, None] - 1 - torch.arange(runs.shape[1])
    return Measurement(
        tokens_per_pass=float((stops - starts).sum() / visited.sum()),
        by_depth=rates_by_depth(runs, left, visited, count),
        overhead=overhead,
        figures=figures,
    )
