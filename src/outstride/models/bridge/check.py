"""Checks at loading: a bridged model computes what transformers computes, and rows are independent.

A text is run by transformers with its own eager attention and default positions. Then it is run over
pages: the first tokens as a prompt, the rest as a chain, as one branch of a tree, and one token at
every place of a batch. All of them must give the logits of transformers up to rounding. If they have
equal bits among themselves, rows do not depend on their batch, and methods are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from outstride.core.contracts import PassInput
from outstride.core.graph import FloatArray, TokenGraph, chain, tree
from outstride.core.proposal import Proposal, Wants
from outstride.core.sequence import BlockTable
from outstride.errors import UnsupportedModel
from outstride.models.bridge.attention import NAME
from outstride.models.bridge.invariant import ROWS
from outstride.models.bridge.ops import BridgeOps
from outstride.models.bridge.probe import AttentionShape

_PROMPT = 10
_CHAIN = 6
_TOLERANCE = 1e-3
"""Of the largest logit: rounding in float32 stays far below, another mask or position far above."""


@dataclass(slots=True)
class _Text:
    """A sequence that owns the first pages of the cache."""

    ops: BridgeOps
    computed: int = 0

    def run(self, graph: TokenGraph) -> FloatArray:
        """The logits of all nodes of a graph after the computed tokens."""
        size = self.ops.cache.page_size
        needed = -(-(self.computed + len(graph)) // size)
        table = BlockTable(list(range(needed)), list(range(self.computed)))
        slots = self.computed + np.arange(len(graph))
        wants = Wants(nodes=tuple(range(len(graph))), logits=True)
        item = PassInput(Proposal(graph, given=1, wants=wants), table, slots)
        found = self.ops.scores_ahead([item])()[0].logits
        assert found is not None
        return found


def check(model: Any, layers: Sequence[AttentionShape]) -> bool:
    """Whether rows have the same bits at any place of a batch.

    Raises UnsupportedModel if the logits are not those of transformers.
    """
    vocab = model.config.get_text_config(decoder=True).vocab_size
    tokens = np.random.default_rng(0).integers(1, vocab, _PROMPT + _CHAIN)
    others = (tokens + 1) % vocab
    expected = _eager(model, tokens.tolist())
    scale = float(np.abs(expected).max(initial=1.0))

    text = _Text(BridgeOps(model, layers, slots=2 * ROWS, page_size=ROWS))
    prompt = text.run(chain(tokens[:_PROMPT]))
    text.computed = _PROMPT
    straight = text.run(chain(tokens[_PROMPT:], _PROMPT))
    ours = np.concatenate([prompt, straight])
    if not np.allclose(ours, expected, rtol=0, atol=_TOLERANCE * scale):
        raise UnsupportedModel(
            "with pages and explicit positions its logits differ from those of transformers "
            f"(by {float(np.abs(ours - expected).max()):.2g}): positions may be derived from the cache "
            "length, or layers may share more than attention"
        )
    # A tree whose first branch is the same text: nodes of both branches alternate.
    both = np.stack([tokens[_PROMPT:], others[_PROMPT:]], axis=1).reshape(-1)
    parents = [-1, -1, *range(2 * _CHAIN - 2)]
    branch = text.run(tree(both, parents, _PROMPT))[::2]
    if not np.allclose(branch, straight, rtol=0, atol=_TOLERANCE * scale):
        raise UnsupportedModel(
            "in a draft tree its logits depend on nodes of other branches: it looks at neighbouring "
            "rows other than by attention"
        )
    places = text.run(tree([int(tokens[_PROMPT])] * ROWS, [-1] * ROWS, _PROMPT))
    return bool(np.array_equal(branch, straight) and (places == straight[0]).all())


@torch.inference_mode()
def _eager(model: Any, tokens: list[int]) -> FloatArray:
    """The logits of transformers with its own attention, mask and positions."""
    model.set_attn_implementation("eager")
    try:
        found: FloatArray = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    finally:
        model.set_attn_implementation(NAME)
    return found
