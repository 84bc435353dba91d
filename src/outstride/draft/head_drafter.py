"""What drafters share that search a tree over the candidates of a draft head."""

from __future__ import annotations

from outstride.core.contracts import Demand, Drafter
from outstride.core.draft_heads import HeadT, head_of_kind
from outstride.core.sequence import View
from outstride.draft.tree_search import CANDIDATES


class HeadDrafter(Drafter):
    """Drafts the `nodes` likeliest nodes of a tree in which `width` paths go on at each depth.

    A draft head knows what the target has computed, so it can draft only where nothing but the last
    settled token is uncomputed.
    """

    expected_gain: float
    """How many accepted tokens a draft is expected to bring, for sharing out a scarce budget."""
    reads_previous: bool = True
    """Whether it starts from the hidden state before the last settled token; then there must be one."""

    def __init__(self, *, from_: str, nodes: int, width: int) -> None:
        if nodes < 1 or not 1 <= width <= CANDIDATES:
            raise ValueError(f"needs nodes >= 1 and 1 <= width <= {CANDIDATES}")
        self.draft_heads = (from_,)
        self.nodes = nodes
        self.width = width

    def can_draft(self, view: View) -> bool:
        """Whether the draft head has the hidden states and KV that it starts from."""
        return view.num_uncomputed() == 1 and (view.end >= 2 or not self.reads_previous)

    def demand(self, view: View) -> Demand:
        if not self.can_draft(view) or view.limit - view.end <= 1:
            return Demand()
        return Demand(max_nodes=self.nodes, gain=self.expected_gain)

    def head(self, view: View, kind: type[HeadT]) -> HeadT:
        """The draft head, which must be of this kind."""
        return head_of_kind(view.draft_head(self.draft_heads[0]), kind)
