"""A draft head with a few layers on the target's hidden states drafts a block in one pass."""

from __future__ import annotations

from functools import cache

from outstride.core import host_library
from outstride.core.contracts import DraftRounds
from outstride.core.draft_heads import BlockDraftHead
from outstride.core.draft_tree import DraftTree
from outstride.core.graph import block
from outstride.core.proposal import Proposal, Wants
from outstride.core.sampling import SamplingSpec
from outstride.core.sequence import View
from outstride.draft.head_drafter import HeadDrafter
from outstride.draft.tree_search import CANDIDATES, TreeSearch, chain_of
from outstride.registry import method


@cache
def _wants(depth: int) -> Wants:
    return Wants(nodes=tuple(range(1, depth)), best=CANDIDATES)


@method("block-drafter", family="trained")
class BlockDrafter(HeadDrafter):
    """A draft head of a few layers, trained on the target's own text, drafts a block in one pass.

    The target's hidden states from several layers become keys and values of the draft head in the same
    pass, so it knows all that the target has computed. Each position is drafted independently of the
    others; a low-rank bigram table joins their candidates to a tree. Its `nodes` likeliest nodes are
    drafted; `width` paths go on at each depth, one for a chain. `from` names the folder of a draft
    head; without it, the one that is shipped for the model is used.

    Paper: DFlash (Chen et al., 2026): a block of masks over KV made from the target's hidden states. Of
      ParallelSpec (Xiao et al., 2024) and PARD (An et al., 2025) it has only that one pass drafts all
      positions, not their training; of Clover (Xiao et al., 2024) only that a token depends on the one
      before, by a bigram table instead of recurrent heads
    Exactness: exact
    Needs: draft head
    Cost per step: one pass of the draft head (its layers and its vocabulary) over a block, and up to
      `nodes` further nodes
    """

    head_kind = "block-drafter"
    expected_gain = 1.5
    reads_previous = False

    def __init__(self, *, from_: str = "", nodes: int = 15, width: int = 4) -> None:
        super().__init__(from_=from_, nodes=nodes, width=width)

    def draft_tree(self, view: View, budget: int) -> DraftRounds:
        if not self.can_draft(view):
            return DraftTree()
        head = self.head(view, BlockDraftHead)
        depth = min(head.block, view.limit - view.end)
        if depth < 2:
            return DraftTree()
        start, params = view.end - 1, view.params
        masks = [head.mask] * (head.block - 1)
        scores = yield Proposal(
            block([view.tokens[-1], *masks], start),
            given=1,
            offset=0,
            draft_head=self.draft_heads[0],
            wants=_wants(depth),
            sampling=SamplingSpec(temperature=params.temperature, seed=view.seed, index=view.index),
        )
        budget = min(budget, self.nodes)
        if self.width == 1 and scores.chain is not None and scores.chain_probabilities is not None:
            return chain_of(scores.chain, scores.chain_probabilities, budget, "block-drafter")
        assert scores.values is not None
        search = TreeSearch(view, head.bigram, self.width)
        return search.all_levels(
            scores.best, scores.values, budget, "block-drafter", host_library.library()
        )
