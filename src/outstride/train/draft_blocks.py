"""Blocks of masks after anchors, the hidden states of a block drafter, and its losses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as fn

from outstride.train.draft_vocabulary import draft_scores
from outstride.train.layers import LayerShape, Pair, Weights, layer, norm, project_heads, within


@dataclass(frozen=True, slots=True)
class DraftBlocks:
    """Blocks over rows of text, each of which begins at an anchor.

    A block holds the anchor's token and masks after it; its places are those masks. Its nodes see
    the text before the anchor, and each other.
    """

    anchors: torch.Tensor
    """[rows, blocks]"""
    anchor_embeddings: torch.Tensor
    """Embeddings of the anchors' tokens: [rows, blocks, width]."""
    rope: Pair
    """Cosines and sines of the nodes: [rows, nodes, head_dim]."""
    mask: torch.Tensor
    """[rows, 1, nodes, length + nodes]"""
    previous: torch.Tensor
    """The position before each place: [rows, blocks, places]."""
    previous_tokens: torch.Tensor
    """Draft-vocabulary index of the token there, or the vocabulary's size if it has none."""
    targets: torch.Tensor
    """Draft-vocabulary index of the correct token of each place, likewise."""
    inside: torch.Tensor
    """Whether the place is within the text."""


def draft_hidden(
    shape: LayerShape,
    count: int,
    weights: Weights,
    features: torch.Tensor,
    context_rope: Pair,
    anchor_embeddings: torch.Tensor,
    rope: Pair,
    mask: torch.Tensor,
) -> torch.Tensor:
    """Normalized hidden states of all places of blocks: [rows, blocks, places, width].

    features: the target's hidden states at each position, [rows, length, taps * width];
    context_rope: cosines and sines there.
    """
    y = norm(features, weights["taps.scale"], shape.eps)
    y = norm(fn.linear(y, weights["fc.weight"]), weights["hidden_norm.weight"], shape.eps)
    rows, many, width = anchor_embeddings.shape
    size = rope[0].shape[1] // many
    masks = weights["mask.weight"].expand(rows, many, size - 1, width)
    x = torch.cat([anchor_embeddings[:, :, None], masks], dim=2).flatten(1, 2)
    for i in range(count):
        own = within(weights, f"layers.{i}.")
        before = (
            project_heads(shape, own, y, "k", context_rope),
            project_heads(shape, own, y, "v", None),
        )
        x = layer(shape, own, x, rope, mask, before)
    x = norm(x, weights["norm.weight"], shape.eps)
    return x.view(rows, many, size, width)[:, :, 1:]


def draft_losses(
    hidden: torch.Tensor,
    before: torch.Tensor,
    head: torch.Tensor,
    after: torch.Tensor,
    targets: torch.Tensor,
    teacher: torch.Tensor | None,
    soft: float,
) -> torch.Tensor:
    """The loss at each place; teacher: the target's own hidden states there, for distillation."""
    scores = draft_scores(hidden, before, head, after)
    losses = fn.cross_entropy(scores, targets, reduction="none")
    if teacher is None:
        return losses
    wanted = fn.linear(teacher, head).float().log_softmax(-1)
    apart = (wanted.exp() * (wanted - scores.log_softmax(-1))).sum(-1)
    return losses + soft * apart
