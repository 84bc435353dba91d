"""Trained embeddings at the positions of the next tokens let the target itself draft what follows."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from outstride.core.contracts import Demand, Drafter, Rounds
from outstride.core.draft_heads import PromptTokensHead, head_of_kind
from outstride.core.draft_tree import AcceptanceKey, DraftTree
from outstride.core.graph import NodeId, chain
from outstride.core.proposal import Proposal, Scores, Verdict, Wants
from outstride.core.sequence import View
from outstride.registry import method


@dataclass(frozen=True, slots=True)
class _Candidates:
    """What the prompt tokens below the last accepted node predicted."""

    end: int
    """The position of the first of them."""
    tokens: list[list[int]]
    """By depth: candidates, best first."""


@dataclass(slots=True)
class _PromptPlan:
    """A draft, and the nodes of it (-1: the last settled token) below which prompt tokens are put."""

    draft: DraftTree
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
    rate: float
    path_rate: float
    """The probability of the whole path."""


def _likeliest(head: PromptTokensHead, candidates: list[list[int]], limit: int) -> list[_Node]:
    """The nodes of the likeliest paths, best first; no node comes before its parent."""
    heap: list[tuple[float, int, _Node]] = []
    found: list[_Node] = []
    count = 0

    def offer(parent: int, depth: int, above: float) -> None:
        nonlocal count
        for rank, token in enumerate(candidates[depth]):
            rate = float(head.rank_accuracy[depth, rank])
            node = _Node(token, parent, depth, rank, rate, above * rate)
            heapq.heappush(heap, (-node.path_rate, count, node))
            count += 1

    offer(-1, 0, 1.0)
    while heap and len(found) < limit:
        node = heapq.heappop(heap)[2]
        found.append(node)
        if node.depth + 1 < len(candidates):
            offer(len(found) - 1, node.depth + 1, node.path_rate)
    return found


@method("prompt-tokens", family="trained")
class PromptTokens(Drafter):
    """Trained prompt tokens are verified along with each draft and predict the next one.

    A pass verifies a tree of drafted tokens. Below its root and its likelier nodes are the prompt
    tokens: inputs that stand for tokens still to come. Below the node where the accepted path ends,
    they have predicted what may follow, which is the next draft. How often candidates of each rank
    and depth are right was measured in training; the tree has the `nodes` likeliest nodes. Nodes
    that are reached with a probability below `min_prob` carry no prompt tokens. `from` names the
    folder of the prompt tokens.

    Paper: Parallel Prompt Decoding, PPD (Chen et al., 2024), without its fitting of the tree to the
      hardware; PaSS (Monea et al., 2023): look-ahead embeddings
    Exactness: exact
    Needs: draft head
    Cost per step: up to `nodes` further nodes, and all prompt tokens below the last settled token
      and below each of the likelier nodes
    """

    head_kind = "prompt-tokens"

    def __init__(self, *, from_: str = "", nodes: int = 4, min_prob: float = 0.15) -> None:
        if nodes < 1 or not 0 <= min_prob <= 1:
            raise ValueError("needs nodes >= 1 and min_prob from 0 to 1")
        self.draft_heads = (from_,)
        self.nodes = nodes
        self.min_prob = min_prob

    def _head(self, view: View) -> PromptTokensHead:
        return head_of_kind(view.draft_head(self.draft_heads[0]), PromptTokensHead)

    def demand(self, view: View) -> Demand:
        if view.limit - view.end <= 1:
            return Demand()
        head = self._head(view)
        plan = self._plan(view, head, head.block * (self.nodes + 1))
        return Demand(max_nodes=plan.size, gain=0.5 + plan.gain)

    def _plan(self, view: View, head: PromptTokensHead, budget: int) -> _PromptPlan:
        """What fits: prompt tokens below the last settled token first, then the likeliest nodes."""
        count, state = head.block - 1, view.state
        fits = budget >= count
        plan = _PromptPlan(DraftTree(), [-1] if fits else [], count if fits else 0, 0.0)
        if state is None or state.end != view.end:
            return plan
        for node in _likeliest(head, state.tokens, self.nodes):
            carried = count if node.path_rate >= self.min_prob else 0
            if plan.size + 1 + carried > budget or node.depth >= view.limit - view.end - 1:
                break
            key = AcceptanceKey(self.name, (node.depth, node.rank))
            plan.draft.add(node.token, node.parent, key, node.rate)
            plan.size += 1 + carried
            plan.gain += node.path_rate
            if carried:
                plan.carriers.append(len(plan.draft) - 1)
        return plan

    def propose(self, view: View, budget: int) -> Rounds:
        yield from ()
        given, head = view.given(), self._head(view)
        if budget < 1:
            return Proposal(given, len(given))
        plan = self._plan(view, head, budget)
        graph = given.grow(plan.draft.graph(view.end)) if len(plan.draft) else given
        inputs = list(range(head.first_token, head.first_token + head.block - 1))
        for place in plan.carriers:
            node = len(given) + place
            below = chain(inputs, int(graph.positions[node]) + 1, probe=True)
            graph = graph.grow(below, at=NodeId(node))
        return Proposal(graph, len(given), wants=Wants(best=head.rank_accuracy.shape[1]))

    def observe(
        self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict
    ) -> _Candidates | None:
        graph, count = proposal.graph, self._head(view).block - 1
        below = [node for node in graph.children(verdict.keep[-1]) if graph.probes[node]]
        if not below:
            return None
        # `propose` grows the prompt tokens of a node in one go: their ids are consecutive.
        tokens = [
            [int(token) for token in scores.candidates(NodeId(below[0] + i))] for i in range(count)
        ]
        return _Candidates(view.end, tokens)
