"""Medusa and Hydra heads: small networks on the target's last hidden state draft the next tokens."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from outstride.core.contracts import DraftRounds
from outstride.core.draft_heads import MedusaDraftHead
from outstride.core.draft_tree import DraftTree
from outstride.core.graph import ROOT, FloatArray, TokenGraph, chain, tree
from outstride.core.proposal import Proposal, Scores, Wants
from outstride.core.sequence import View
from outstride.draft.head_drafter import HeadDrafter
from outstride.draft.tree_search import CANDIDATES, TreeSearch
from outstride.registry import method


@method("heads", family="trained")
class Heads(HeadDrafter):
    """Small heads on the hidden state that chose the last token draft the next ones, one head for each.

    Independent heads answer all at once; a bigram table joins their candidates to a tree.
    Sequential ones
    are asked level by level: each starts from the state of the head before it and the token that was
    drafted there, so every branch of the tree has its own continuation. The hidden state is stored
    next to the target's KV, so a prefix hit, a fork or a preemption does not lose it. The `nodes`
    likeliest nodes are drafted; `width` paths go on at each depth. `from` names the folder of the
    heads.

    Paper: Medusa (Cai et al., 2024): its heads on a frozen target (Medusa-1) and its tree
      attention, not its typical acceptance; Blockwise Parallel Decoding (Stern et al., 2018):
      predict, then keep the verified prefix, without its fine-tuning of the model; of its draft
      refinement (Kim et al., 2024) only the n-gram rescoring, as a bigram table; Hydra (Ankner et
      al., 2024): sequential heads. Of Clover (Xiao et al., 2024) and S4C (He et al., 2025) it has
      only that heads are sequential, not Clover's attention block nor S4C's continuous verification
      tree
    Exactness: exact
    Needs: draft head
    Cost per step: the heads (a few small products and their vocabulary; sequential: once for each
      depth), and up to `nodes` further nodes
    """

    head_kind = "heads"
    expected_gain = 1.2

    def __init__(self, *, from_: str = "", nodes: int = 12, width: int = 3) -> None:
        super().__init__(from_=from_, nodes=nodes, width=width)

    def draft_tree(self, view: View, budget: int) -> DraftRounds:
        if not self.can_draft(view):
            return DraftTree()
        head = self.head(view, MedusaDraftHead)
        depth = min(head.block - 1, view.limit - view.end - 1)
        if depth < 1:
            return DraftTree()
        low, high = head.feature_range
        hidden = view.feature(view.end - 2)[low:high][None]
        search = TreeSearch(view, head.bigram, self.width)
        ask = self._level_by_level if head.sequential else self._at_once
        yield from ask(view, search, hidden, depth)
        return search.likeliest(min(budget, self.nodes), "heads")

    def _proposal(self, graph: TokenGraph, hidden: FloatArray, wants: Wants) -> Proposal:
        """A pass of the heads; hidden: [nodes, hidden_size]."""
        return Proposal(graph, given=1, draft_head=self.draft_heads[0], hidden=hidden, wants=wants)

    def _at_once(
        self, view: View, search: TreeSearch, hidden: FloatArray, depth: int
    ) -> Generator[Proposal, Scores, None]:
        """One node for each head; only the first has a known token, and heads do not read it."""
        graph = chain([view.tokens[-1]] * depth, view.end - 1)
        wants = Wants(nodes=tuple(range(depth)), best=CANDIDATES)
        scores = yield self._proposal(graph, np.repeat(hidden, depth, axis=0), wants)
        assert scores.values is not None
        for tokens, values in zip(scores.best, scores.values, strict=True):
            search.grow(tokens, values)

    def _level_by_level(
        self, view: View, search: TreeSearch, hidden: FloatArray, depth: int
    ) -> Generator[Proposal, Scores, None]:
        """One round for each depth, over the ends of the paths that go on."""
        tokens, parents, ends = [view.tokens[-1]], [int(ROOT)], [0]
        for level in range(depth):
            graph = tree(tokens, parents, view.end - 1)
            wants = Wants(nodes=tuple(ends), best=CANDIDATES, hidden=(0,))
            scores = yield self._proposal(graph, hidden, wants)
            assert scores.values is not None
            origins = search.grow(scores.best, scores.values)
            if level + 1 < depth:
                parents += [ends[origin] for origin in origins]
                ends = list(range(len(tokens), len(tokens) + len(origins)))
                tokens += search.last.tolist()
                hidden = np.concatenate([hidden, scores.hidden[0][origins]])
