"""`diffuse`: a masked model drafts a block in one pass; the target verifies the best paths."""

from __future__ import annotations

import math
from collections.abc import Sequence

from outstride.core.contracts import Demand, Drafter, DraftRounds, Rounds
from outstride.core.draft_tree import AcceptanceKey, DraftTree
from outstride.core.graph import NodeId, TokenGraph, block, chain, nodes_for
from outstride.core.proposal import Proposal, Scores, Verdict, Wants
from outstride.core.sequence import View
from outstride.draft.draft import agreement_rates
from outstride.draft.tree_expansion import Branch, best_branches, best_paths
from outstride.registry import method

Lattice = list[list[tuple[int, float]]]
"""For each position to come, its candidates and their acceptance rates."""


@method("diffuse", family="diffusion drafting")
class DiffusionDrafter(Drafter):
    """A masked model fills in the next positions at once; the target checks the best paths as a tree.

    Every position comes with its `width` best tokens. They were not chosen with regard to each other,
    so a search from left to right looks for paths that hang together: a path is worth the product of
    its tokens' acceptance rates, times exp(`pair`) for every two neighbours that already occur next to
    each other in the text. The `nodes` best are sent. With two or more `passes` the surer half of the
    predictions is filled in and the rest predicted again. Drafts grow and shrink with what was
    accepted lately, up to `length`. The bigrams of the text are this project's measure of consistency;
    DEER's two stages of training are not here: any masked model of the same vocabulary will do.

    Paper: DiffuSpec (Li et al., 2025), with bigrams of the text to search by; SpecDiff
      (Christopher et al., 2024); DEER (Cheng et al., 2025), without its training
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
        self.models = self.masked_models = (model,)
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
        return Demand(max_nodes=min(self.nodes, depth * self.width**2), gain=0.5 * depth)

    def propose(self, view: View, budget: int) -> Rounds:
        drafted = yield from self.draft_tree(view, budget)  # without budget it still prefills
        return drafted.proposal(view, self.wants)

    def draft_tree(self, view: View, budget: int) -> DraftRounds:
        own = view.given(self.model, self._chunk(view))
        depth = self._depth(view)
        if budget <= 0 or depth == 0 or len(own) < view.num_uncomputed(self.model):
            if len(own):
                yield Proposal(own, len(own), self.model, wants=Wants(nodes=()))
            return DraftTree()
        filled: dict[int, int] = {}
        found: dict[int, list[tuple[int, float]]] = {}
        graph, masked = own, view.masked_spec(self.model)
        offset = int(masked is not None and masked.shifted)
        for step in range(self.passes):
            canvas = self._canvas(view, depth, filled)
            open_ = [p for p in range(view.end, view.end + depth) if p not in filled]
            nodes = [n + len(graph) for n in nodes_for(canvas, open_, offset)]
            first = int(canvas.positions[0])
            if offset and step == 0 and first in open_ and len(own):
                # The token before a shifted block scores the block's first position.
                nodes.insert(0, len(own) - 1)
            graph = graph.grow(canvas, at=NodeId(len(own) - 1))
            wants = Wants(nodes=tuple(nodes), best=self.width, logprobs=4 * self.width)
            scores = yield Proposal(graph, len(own), self.model, offset=offset, wants=wants)
            for node in map(NodeId, nodes):
                at = int(graph.positions[node]) + offset
                rates = agreement_rates(view, scores, node, at)
                found[at] = list(zip(map(int, scores.candidates(node)), rates, strict=True))
            if step + 1 < self.passes:
                sure = sorted(found, key=lambda p: (-found[p][0][1], p))
                filled = {p: found[p][0][0] for p in sure[: -(-len(sure) // 2)]}
        lattice: Lattice = []
        while (at := view.end + len(lattice)) in found:
            lattice.append(found[at])
        return self._paths(view, lattice, budget)

    def _chunk(self, view: View) -> int:
        """How many tokens the model prefills in one round: whole blocks."""
        size = view.block(self.model)
        return view.chunk if size is None else max(view.chunk // size, 1) * size

    def _canvas(self, view: View, depth: int, filled: dict[int, int]) -> TokenGraph:
        """The masks to fill in, in blocks as the model attends to them, after the computed tokens."""
        masked, size, end = view.masked_spec(self.model), view.block(self.model), int(view.end)
        mask = 0 if masked is None else masked.token

        def inputs(positions: Sequence[int]) -> list[int]:
            return [view.tokens[p] if p < end else filled.get(p, mask) for p in positions]

        if size is None:
            ahead = range(end, end + depth)
            one = masked is not None and masked.block is not None
            return block(inputs(ahead), positions=ahead) if one else chain(inputs(ahead), end)
        start = 0 if size > end + depth else end // size * size
        step = end + depth if start == 0 and size > end + depth else size
        graph = block(inputs(range(start, start + step)), start)
        while int(graph.positions[-1]) + 1 < end + depth:
            start += step
            graph = graph.grow(block(inputs(range(start, start + step)), start))
        return graph

    def _paths(self, view: View, lattice: Lattice, budget: int) -> DraftTree:
        """The best paths through a lattice, as a tree."""
        pairs = set(zip(view.tokens, view.tokens[1:], strict=False))
        drafted: list[Branch] = []
        continued = [Branch(token=view.tokens[-1], parent=-1)]
        for level in lattice:
            fresh = []
            for above in continued:
                for rank, (token, rate) in enumerate(level):
                    score = above.score + math.log(max(rate, 1e-9))
                    score += self.pair * ((above.token, token) in pairs)
                    score = min(
                        score, above.score
                    )  # never better than its parent, see `best_paths`
                    fresh.append(Branch(token, above.place, rank=rank, score=score, rate=rate))
            continued = best_branches(fresh, self.width)
            for place, branch in enumerate(continued, start=len(drafted)):
                branch.place = place
            drafted += continued
        found = DraftTree()
        for branch in best_paths(drafted, min(budget, self.nodes)):
            key = AcceptanceKey("diffuse", (branch.rank, int(8 * branch.rate)))
            found.add(branch.token, branch.parent, key, branch.rate)
        return found

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> float:
        lately: float = view.state if view.state is not None else self.length / 2
        if len(proposal.graph) == proposal.given:
            return lately
        return 0.7 * lately + 0.3 * (len(verdict.settled) - 1)
