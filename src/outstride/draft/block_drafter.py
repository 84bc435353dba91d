"""The block-drafter: a few trained layers on the target's states guess a block in one pass."""

from __future__ import annotations

from functools import cache

from outstride.core import host
from outstride.core.contracts import Demand, Drafter, Guessing
from outstride.core.graph import block
from outstride.core.guess import Guess
from outstride.core.proposal import Proposal, Wants
from outstride.core.sampling import Draw
from outstride.core.sequence import View
from outstride.draft.paths import CANDIDATES, Paths, chained
from outstride.registry import method


@cache
def _wants(depth: int) -> Wants:
    return Wants(nodes=tuple(range(1, depth)), best=CANDIDATES)


@method("block-drafter", family="trained")
class BlockDrafter(Drafter):
    """A few layers, trained on the target's own words, guess the next positions all at once.

    They read the states of several of the target's layers, which become their keys and values in the
    same pass, so they know whatever the target has read. Each position is guessed apart from the
    others; a low-rank table of which token follows which joins the guesses to a tree, of which the
    `nodes` likeliest paths are drafted: `width` of them go on at each depth, one for a chain. `from`
    names the folder of a trained part; without it, the one that is shipped for the model.

    Paper: KV-injected block drafters as DFlash (Chen et al., 2026), after ParallelSpec (Xiao et al.,
      2024) and PARD (An et al., 2025); the chained correction after Clover (Xiao et al., 2024)
    Exactness: exact
    Needs: trained part
    Cost per step: one pass of the part (its layers and its part of the vocabulary) over a block, and up
      to `nodes` further nodes
    """

    part = "block-drafter"

    def __init__(self, *, from_: str = "", nodes: int = 15, width: int = 4) -> None:
        if nodes < 1 or not 1 <= width <= CANDIDATES:
            raise ValueError(f"needs nodes >= 1 and 1 <= width <= {CANDIDATES}")
        self.grafts = (from_,)
        self.nodes = nodes
        self.width = width

    def demand(self, view: View) -> Demand:
        if view.pending() != 1 or view.limit - view.end <= 1:
            return Demand()
        return Demand(most=self.nodes, gain=1.5)

    def guess(self, view: View, room: int) -> Guessing:
        if view.pending() != 1:  # what the target has not read, the part does not know
            return Guess()
        graft = view.graft(self.grafts[0])
        depth = min(graft.block, view.limit - view.end)
        if depth < 2:
            return Guess()
        start, params = view.end - 1, view.params
        masks = [graft.mask] * (graft.block - 1)
        scores = yield Proposal(
            block([view.tokens[-1], *masks], start),
            given=1,
            offset=0,
            graft=self.grafts[0],
            wants=_wants(depth),
            draw=Draw(temperature=params.temperature, seed=view.seed, index=view.index),
        )
        if self.width == 1 and scores.chain is not None and scores.chances is not None:
            return chained(scores.chain, scores.chances, min(room, self.nodes), "block-drafter")
        assert scores.values is not None
        paths = Paths(view, graft, self.width)
        room = min(room, self.nodes)
        return paths.through(scores.best, scores.values, room, "block-drafter", host.library())
