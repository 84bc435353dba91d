"""A few trained inputs, put where the next tokens will stand, let the target say what comes then."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from outstride.core.contracts import Demand, Drafter, Graft, Rounds
from outstride.core.graph import NodeId, chain
from outstride.core.guess import Guess, Sign
from outstride.core.proposal import Proposal, Scores, Verdict, Wants
from outstride.core.sequence import View
from outstride.registry import method


@dataclass(frozen=True, slots=True)
class _State:
    """What the prompt tokens below the last accepted node said."""

    end: int
    """The position that they speak of first."""
    candidates: list[list[int]]


@dataclass(slots=True)
class _Plan:
    """A draft, and below which of its nodes (-1: the last settled token) prompt tokens hang."""

    guess: Guess
    carriers: list[int]
    size: int
    """Nodes in all."""
    gain: float


@dataclass(frozen=True, slots=True)
class _Node:
    """A candidate as a node of the tree."""

    token: int
    parent: int
    depth: int
    rank: int
    chance: float
    reach: float
    """The chance of the whole path."""


def _likeliest(graft: Graft, candidates: list[list[int]], most: int) -> list[_Node]:
    """The nodes of the likeliest paths, best first; no node comes before its parent."""
    ranks = graft.ranks
    assert ranks is not None
    heap: list[tuple[float, int, _Node]] = []
    found: list[_Node] = []
    count = 0

    def offer(parent: int, depth: int, above: float) -> None:
        nonlocal count
        for rank, token in enumerate(candidates[depth]):
            chance = float(ranks[depth, rank])
            node = _Node(token, parent, depth, rank, chance, above * chance)
            heapq.heappush(heap, (-node.reach, count, node))
            count += 1

    offer(-1, 0, 1.0)
    while heap and len(found) < most:
        node = heapq.heappop(heap)[2]
        found.append(node)
        if node.depth + 1 < len(candidates):
            offer(len(found) - 1, node.depth + 1, node.reach)
    return found


@method("prompt-tokens", family="trained")
class PromptTokens(Drafter):
    """Trained look-ahead inputs ride along with each draft and leave the next one behind.

    A pass verifies a tree of drafted tokens, and below its root and its likelier nodes hang the
    prompt tokens: inputs that stand for tokens still to come. Below the node where the tree ends,
    they have said what may follow, which is the next draft. How often candidates of each rank and
    depth are right was measured in training; the tree has the `nodes` likeliest paths. Nodes that are
    reached less often than `least` carry no prompt tokens. `from` names the folder of the inputs.

    Paper: Parallel Prompt Decoding, PPD (Chen et al., 2024); PaSS (Monea et al., 2023)
    Exactness: exact
    Needs: trained part
    Cost per step: up to `nodes` further nodes, and as many prompt tokens as the part has below the
      last settled token and below each of the likelier ones
    """

    part = "prompt-tokens"

    def __init__(self, *, from_: str = "", nodes: int = 4, least: float = 0.15) -> None:
        if nodes < 1 or not 0 <= least <= 1:
            raise ValueError("needs nodes >= 1 and least from 0 to 1")
        self.grafts = (from_,)
        self.nodes = nodes
        self.least = least

    def demand(self, view: View) -> Demand:
        if view.limit - view.end <= 1:
            return Demand()
        graft = view.graft(self.grafts[0])
        plan = self._plan(view, graft, graft.block * (self.nodes + 1))
        return Demand(most=plan.size, gain=0.5 + plan.gain)

    def _plan(self, view: View, graft: Graft, room: int) -> _Plan:
        """What fits: prompt tokens below the last settled token first, then paths, likeliest first."""
        count, state = graft.block - 1, view.state
        plan = _Plan(Guess(), [-1] if room >= count else [], count if room >= count else 0, 0.0)
        if state is None or state.end != view.end:
            return plan
        for node in _likeliest(graft, state.candidates, self.nodes):
            carries = count if node.reach >= self.least else 0
            if plan.size + 1 + carries > room or node.depth >= view.limit - view.end - 1:
                break
            sign = Sign(self.name, (node.depth, node.rank))
            plan.guess.add(node.token, node.parent, sign, node.chance)
            plan.size += 1 + carries
            plan.gain += node.reach
            if carries:
                plan.carriers.append(len(plan.guess) - 1)
        return plan

    def propose(self, view: View, room: int) -> Rounds:
        yield from ()
        given, graft = view.given(), view.graft(self.grafts[0])
        if room < 1:
            return Proposal(given, len(given))
        plan = self._plan(view, graft, room)
        graph = given.grow(plan.guess.graph(view.end)) if len(plan.guess) else given
        inputs = list(range(graft.mask, graft.mask + graft.block - 1))
        for place in plan.carriers:
            node = len(given) + place
            below = chain(inputs, int(graph.positions[node]) + 1, probe=True)
            graph = graph.grow(below, at=NodeId(node))
        assert graft.ranks is not None
        return Proposal(graph, len(given), wants=Wants(best=graft.ranks.shape[1]))

    def observe(
        self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict
    ) -> _State | None:
        graph, count = proposal.graph, view.graft(self.grafts[0]).block - 1
        below = [node for node in graph.children(verdict.keep[-1]) if graph.probes[node]]
        if not below:
            return None
        candidates = [
            [int(token) for token in scores.rivals(NodeId(below[0] + i))] for i in range(count)
        ]
        return _State(view.end, candidates)
