"""EAGLE: one layer on hidden states, first the target's, then its own, drafts token by token."""

from __future__ import annotations

from outstride.core.contracts import DraftRounds
from outstride.core.draft_heads import EagleDraftHead
from outstride.core.draft_tree import DraftTree
from outstride.core.graph import ROOT, tree
from outstride.core.proposal import Proposal, Wants
from outstride.core.sequence import View
from outstride.draft.head_drafter import HeadDrafter
from outstride.draft.tree_search import CANDIDATES, TreeSearch
from outstride.registry import method


@method("eagle", family="trained")
class Eagle(HeadDrafter):
    """A published EAGLE or EAGLE-3 drafter: one layer that drafts a tree, level by level.

    It reads each token with the target's hidden state before it, or with its own where the target
    has not been yet. Each level is a round: the `width` likeliest paths go on, down to `depth`
    tokens, and the `nodes` likeliest nodes of all are drafted. `from` names the folder as it was
    published, in EAGLE's own layout or in the speculators format.

    Paper: EAGLE (Li et al., 2024), the dynamic tree of EAGLE-2 (Li et al., 2024), EAGLE-3 (Li et al.,
      2025)
    Exactness: exact
    Needs: draft head
    Cost per step: `depth` passes of the draft head (its layer and its vocabulary) over up to
      `width` nodes, and up to `nodes` further nodes
    """

    head_kind = "eagle"
    expected_gain = 1.5

    def __init__(self, *, from_: str = "", depth: int = 5, nodes: int = 16, width: int = 4) -> None:
        super().__init__(from_=from_, nodes=nodes, width=width)
        if depth < 1:
            raise ValueError("needs depth >= 1")
        self.depth = depth

    def draft_tree(self, view: View, budget: int) -> DraftRounds:
        if not self.can_draft(view):
            return DraftTree()
        self.head(view, EagleDraftHead)
        search = TreeSearch(view, None, self.width)
        tokens, parents, ends = [view.tokens[-1]], [int(ROOT)], [0]
        for _ in range(min(self.depth, view.limit - view.end - 1)):
            scores = yield Proposal(
                tree(tokens, parents, view.end - 1),
                given=1,
                draft_head=self.draft_heads[0],
                wants=Wants(nodes=tuple(ends), best=CANDIDATES),
            )
            assert scores.values is not None
            parents += [ends[origin] for origin in search.grow(scores.best, scores.values)]
            ends = list(range(len(tokens), len(parents)))
            tokens += search.last.tolist()
        return search.likeliest(min(budget, self.nodes), "eagle")
