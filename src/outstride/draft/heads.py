"""Heads on the target's last state guess the tokens further ahead."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from outstride.core.contracts import Demand, Drafter, Guessing
from outstride.core.graph import ROOT, FloatArray, TokenGraph, chain, tree
from outstride.core.guess import Guess
from outstride.core.proposal import Proposal, Scores, Wants
from outstride.core.sequence import View
from outstride.draft.paths import CANDIDATES, Paths
from outstride.registry import method


@method("heads", family="trained")
class Heads(Drafter):
    """Small heads on the state that chose the last token guess those behind it, one head for each.

    Independent heads answer all at once, each for itself; a table of which token follows which joins
    their guesses to a tree. Chained ones are asked level by level: each starts from the state of the
    head before it and the token that was guessed there, so every branch of the tree has its own
    continuation. The state lies in the target's pages: a prefix hit, a fork or a preemption does not
    lose it. The `nodes` likeliest paths are drafted; `width` of them go on at each depth. `from`
    names the folder of the heads.

    Paper: Medusa (Cai et al., 2024); Blockwise Parallel Decoding (Stern et al., 2018) and its draft
      refinement (Kim et al., 2024); chained as in Hydra (Ankner et al., 2024), Clover (Xiao et al.,
      2024) and S4C (He et al., 2025)
    Exactness: exact
    Needs: trained part
    Cost per step: the heads (a few small products and their part of the vocabulary; chained: once for
      each depth), and up to `nodes` further nodes
    """

    part = "heads"

    def __init__(self, *, from_: str = "", nodes: int = 12, width: int = 3) -> None:
        if nodes < 1 or not 1 <= width <= CANDIDATES:
            raise ValueError(f"needs nodes >= 1 and 1 <= width <= {CANDIDATES}")
        self.grafts = (from_,)
        self.nodes = nodes
        self.width = width

    def demand(self, view: View) -> Demand:
        if view.pending() != 1 or view.end < 2 or view.limit - view.end <= 1:
            return Demand()
        return Demand(most=self.nodes, gain=1.2)

    def guess(self, view: View, room: int) -> Guessing:
        if view.pending() != 1 or view.end < 2:  # nothing was read that could have a state
            return Guess()
        graft = view.graft(self.grafts[0])
        depth = min(graft.block - 1, view.limit - view.end - 1)
        if depth < 1:
            return Guess()
        low, high = graft.plane
        state = view.feature(view.end - 2)[low:high][None]
        paths = Paths(view, graft, self.width)
        ask = self._level_by_level if graft.chained else self._at_once
        yield from ask(view, paths, state, depth)
        return paths.guess(min(room, self.nodes), "heads")

    def _asking(self, graph: TokenGraph, states: FloatArray, wants: Wants) -> Proposal:
        return Proposal(graph, given=1, graft=self.grafts[0], hidden=states, wants=wants)

    def _at_once(
        self, view: View, paths: Paths, state: FloatArray, depth: int
    ) -> Generator[Proposal, Scores, None]:
        """One node for each head; only the first has a token that is known."""
        graph = chain([view.tokens[-1]] * depth, view.end - 1)
        wants = Wants(nodes=tuple(range(depth)), best=CANDIDATES)
        scores = yield self._asking(graph, np.repeat(state, depth, axis=0), wants)
        assert scores.values is not None
        for tokens, values in zip(scores.best, scores.values, strict=True):
            paths.grow(tokens, values)

    def _level_by_level(
        self, view: View, paths: Paths, state: FloatArray, depth: int
    ) -> Generator[Proposal, Scores, None]:
        """One round for each depth, over the ends of the paths that go on."""
        tokens, parents = [view.tokens[-1]], [int(ROOT)]
        states, ends = state, [0]
        for level in range(depth):
            graph = tree(tokens, parents, view.end - 1)
            wants = Wants(nodes=tuple(ends), best=CANDIDATES, hidden=(0,))
            scores = yield self._asking(graph, states, wants)
            assert scores.values is not None
            origins = paths.grow(scores.best, scores.values)
            if level + 1 < depth:
                parents += [ends[origin] for origin in origins]
                ends = list(range(len(tokens), len(tokens) + len(origins)))
                tokens += paths.last.tolist()
                states = np.concatenate([states, scores.hidden[0][origins]])
