"""EAGLE: a layer on the target's states guesses token after token from states of its own."""

from __future__ import annotations

from outstride.core.contracts import Demand, Drafter, Guessing
from outstride.core.graph import ROOT, tree
from outstride.core.guess import Guess
from outstride.core.proposal import Proposal, Wants
from outstride.core.sequence import View
from outstride.draft.paths import CANDIDATES, Paths
from outstride.registry import method


@method("eagle", family="trained")
class Eagle(Drafter):
    """A published EAGLE or EAGLE-3 drafter: one layer that writes token by token, as a tree.

    It reads each token together with the target's state in front of it; where the target has not been
    yet, its own state stands in. Each level is a round: the `width` likeliest paths go on, down to
    `depth` tokens, and the `nodes` likeliest of all are drafted. `from` names the folder as it was
    published, EAGLE's own layout or the speculators format.

    Paper: EAGLE (Li et al., 2024), the tree of EAGLE-2 (Li et al., 2024), EAGLE-3 (Li et al., 2025)
    Exactness: exact
    Needs: trained part
    Cost per step: `depth` passes of the part (its layer and its part of the vocabulary) over up to
      `width` nodes, and up to `nodes` further nodes
    """

    part = "eagle"

    def __init__(self, *, from_: str = "", depth: int = 5, nodes: int = 16, width: int = 4) -> None:
        if depth < 1 or nodes < 1 or not 1 <= width <= CANDIDATES:
            raise ValueError(f"needs depth >= 1, nodes >= 1 and 1 <= width <= {CANDIDATES}")
        self.grafts = (from_,)
        self.depth = depth
        self.nodes = nodes
        self.width = width

    def demand(self, view: View) -> Demand:
        if view.pending() != 1 or view.end < 2 or view.limit - view.end <= 1:
            return Demand()
        return Demand(most=self.nodes, gain=1.5)

    def guess(self, view: View, room: int) -> Guessing:
        if view.pending() != 1 or view.end < 2:  # there is no state in front of the first token
            return Guess()
        paths = Paths(view, view.graft(self.grafts[0]), self.width)
        tokens, parents, ends = [view.tokens[-1]], [int(ROOT)], [0]
        for _ in range(min(self.depth, view.limit - view.end - 1)):
            scores = yield Proposal(
                tree(tokens, parents, view.end - 1),
                given=1,
                graft=self.grafts[0],
                wants=Wants(nodes=tuple(ends), best=CANDIDATES),
            )
            assert scores.values is not None
            parents += [ends[origin] for origin in paths.grow(scores.best, scores.values)]
            ends = list(range(len(tokens), len(parents)))
            tokens += paths.last.tolist()
        return paths.guess(min(room, self.nodes), "eagle")
