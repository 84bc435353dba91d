"""The draft vocabulary: the frequent tokens that a draft head can propose, and their scores."""

from __future__ import annotations

import torch
from torch.nn import functional as fn

ROUND = 256
"""The draft vocabulary has a multiple of this many tokens, if the target's is large enough."""


def draft_scores(
    hidden: torch.Tensor, before: torch.Tensor, head: torch.Tensor, after: torch.Tensor
) -> torch.Tensor:
    """Scores over the draft vocabulary: those of the LM head, corrected by the previous token."""
    return fn.linear(hidden, head).float() + fn.linear(before, after).float()


def frequent_tokens(tokens: torch.Tensor, size: int, cover: float) -> torch.Tensor:
    """The fewest tokens that make up a share `cover` of a text, rounded up to a multiple of `ROUND`;
    sorted.
    """
    counts = torch.bincount(tokens.flatten(), minlength=size)
    sorted_counts, order = counts.sort(descending=True, stable=True)
    reached = sorted_counts.cumsum(0) >= cover * counts.sum()
    needed = int(reached.int().argmax()) + 1
    return order[: min(size, -(-needed // ROUND) * ROUND)].sort().values
