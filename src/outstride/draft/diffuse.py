"""A masked model drafts a block in one pass; the target verifies the best ways through it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from outstride.core.contracts import Demand, Drafter, Guessing, Rounds
from outstride.core.graph import NodeId, TokenGraph, block, chain
from outstride.core.guess import Guess, Sign
from outstride.core.proposal import Proposal, Scores, Verdict, Wants
from outstride.core.sequence import View
from outstride.draft.canvas import nodes_for
from outstride.draft.draft import chances
from outstride.draft.writer import Branch, leading, pruned
from outstride.registry import method

Lattice = list[list[tuple[int, float]]]
"""For each position to come, its tokens and their chances."""


@method("diffuse", family="diffusion drafting")
class Diffuse(Drafter):
    """A masked model fills in the next positions at once; the target checks the best paths as a tree.

    Every position comes with its `width` best tokens. They were not chosen with regard to each other,
    so a search from left to right looks for paths that hang together: a path is worth the product of
    its tokens' chances, and `pair` more for every two tokens that the text has had side by side. The
    `nodes` best are sent. With two or more `passes` the surer half of the guesses is filled in and the
    rest guessed again. Drafts grow and shrink with what was accepted lately, up to `length`.

    Paper: DiffuSpec (Li et al., 2025); SpecDiff (Christopher et al., 2024); DEER (Cheng et al., 2025)
    Exactness: exact
    Needs: draft model
    Cost per step: `passes` passes of the masked model over `length` masks (one that sees a whole
      canvas: over all of it), and up to `nodes` further nodes of the target
    """

    def __init__(
        self,
        *,
        model: str,
        length: int = 8,
        width: int = 2,
        nodes: int = 16,
        passes: int = 1,
        pair: float = 0.5,
    ) -> None:
        if min(length, width, nodes, passes) < 1 or pair < 0:
            raise ValueError("needs length, width, nodes and passes >= 1 and pair >= 0")
        self.models = self.fills = (model,)
        self.model = model
        self.length = length
        self.width = width
        self.nodes = nodes
        self.passes = passes
        self.pair = pair

    def _depth(self, view: View) -> int:
        lately: float = view.state if view.state is not None else self.length
        return max(0, min(self.length, round(2 * lately) + 1, view.limit - view.end - 1))

    def demand(self, view: View) -> Demand:
        depth = self._depth(view)
        return Demand(most=min(self.nodes, depth * self.width**2), gain=0.5 * depth)

    def propose(self, view: View, room: int) -> Rounds:
        guess = yield from self.guess(view, room)  # without room it still reads along
        return guess.proposal(view, self.wants)

    def guess(self, view: View, room: int) -> Guessing:
        own = view.given(self.model, self._chunk(view))
        depth = self._depth(view)
        if room <= 0 or depth == 0 or len(own) < view.pending(self.model):
            if len(own):
                yield Proposal(own, len(own), self.model, wants=Wants(nodes=()))
            return Guess()
        filled: dict[int, int] = {}
        found: dict[int, list[tuple[int, float]]] = {}
        graph, masking = own, view.masking(self.model)
        offset = int(masking is not None and masking.shifted)
        for turn in range(self.passes):
            canvas = self._canvas(view, depth, filled)
            open_ = [p for p in range(view.end, view.end + depth) if p not in filled]
            nodes = [n + len(graph) for n in nodes_for(canvas, open_, offset)]
            first = int(canvas.positions[0])
            if offset and turn == 0 and first in open_ and len(own):
                nodes.insert(
                    0, len(own) - 1
                )  # what precedes a shifted block scores its first place
            graph = graph.grow(canvas, at=NodeId(len(own) - 1))
            wants = Wants(nodes=tuple(nodes), best=self.width, logprobs=4 * self.width)
            scores = yield Proposal(graph, len(own), self.model, offset=offset, wants=wants)
            for node in map(NodeId, nodes):
                place = int(graph.positions[node]) + offset
                weighed = chances(view, scores, node, place)
                found[place] = list(zip(map(int, scores.rivals(node)), weighed, strict=True))
            if turn + 1 < self.passes:
                sure = sorted(found, key=lambda p: (-found[p][0][1], p))
                filled = {p: found[p][0][0] for p in sure[: -(-len(sure) // 2)]}
        lattice: Lattice = []
        while (place := view.end + len(lattice)) in found:
            lattice.append(found[place])
        return self._paths(view, lattice, room)

    def _chunk(self, view: View) -> int:
        """How much the model reads in one round: whole blocks."""
        size = view.block(self.model)
        return view.chunk if size is None else max(view.chunk // size, 1) * size

    def _canvas(self, view: View, depth: int, filled: dict[int, int]) -> TokenGraph:
        """The masks to be filled in, the way the model sees them, behind what it has read."""
        masking, size, end = view.masking(self.model), view.block(self.model), int(view.end)
        mask = 0 if masking is None else masking.token

        def inputs(places: Sequence[int]) -> list[int]:
            return [view.tokens[p] if p < end else filled.get(p, mask) for p in places]

        if size is None:
            ahead = range(end, end + depth)
            one = masking is not None and masking.block is not None
            return block(inputs(ahead), positions=ahead) if one else chain(inputs(ahead), end)
        start = 0 if size > end + depth else end // size * size
        step = end + depth if start == 0 and size > end + depth else size
        graph = block(inputs(range(start, start + step)), start)
        while int(graph.positions[-1]) + 1 < end + depth:
            start += step
            graph = graph.grow(block(inputs(range(start, start + step)), start))
        return graph

    def _paths(self, view: View, lattice: Lattice, room: int) -> Guess:
        """The best ways through a lattice, as a tree."""
        pairs = set(zip(view.tokens, view.tokens[1:], strict=False))
        written: list[Branch] = []
        going = [Branch(token=view.tokens[-1], parent=-1)]
        for level in lattice:
            fresh = []
            for above in going:
                for rank, (token, chance) in enumerate(level):
                    score = above.score + math.log(max(chance, 1e-9))
                    score += self.pair * ((above.token, token) in pairs)
                    bounded = min(
                        score, above.score
                    )  # nobody is worth more than what it hangs from
                    branch = Branch(token, above.place, rank=rank, score=bounded, chance=chance)
                    fresh.append(branch)
            going = leading(fresh, self.width)
            for place, branch in enumerate(going, start=len(written)):
                branch.place = place
            written += going
        guess = Guess()
        for branch in pruned(written, min(room, self.nodes)):
            sign = Sign("diffuse", (branch.rank, int(8 * branch.chance)))
            guess.add(branch.token, branch.parent, sign, branch.chance)
        return guess

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> float:
        lately: float = view.state if view.state is not None else self.length / 2
        if len(proposal.graph) == proposal.given:
            return lately
        return 0.7 * lately + 0.3 * (len(verdict.settled) - 1)
