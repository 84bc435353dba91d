"""Every shape of parallel decoding that the nouns must carry, each as a small method.

None of them needs a special case in the loop; that is what they are here to show. Masks are the
toy's first extra row. Models that see in blocks score a node for its own position (offset 0).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np

from outstride.accept.match import Match
from outstride.core.contracts import Acceptor, Demand, Drafter, Rounds
from outstride.core.graph import (
    NodeId,
    Position,
    TokenGraph,
    TokenId,
    alternatives,
    block,
    chain,
    union,
)
from outstride.core.proposal import TARGET, Proposal, Scores, Verdict, Wants
from outstride.core.sequence import View
from tests.conformance.harness import VOCABULARY

MASK = VOCABULARY


def _demand(view: View, limit: int) -> Demand:
    return Demand(max_nodes=max(0, min(limit, view.limit - view.end - 1)), gain=1.0)


class JacobiWindow(Drafter):
    """Jacobi: guesses for the next positions refine themselves, next to an n-gram branch."""

    size = 4

    def demand(self, view: View) -> Demand:
        return _demand(view, 2 * self.size)

    def propose(self, view: View, budget: int) -> Rounds:
        yield from ()
        given = view.given()
        window = (view.state or [1] * self.size)[: budget // 2]
        tokens = view.tokens
        twin = [i for i in range(len(tokens) - 1) if tokens[i] == tokens[-1]][-1:]
        copied = tokens[twin[0] + 1 :][: budget // 2] if twin else []
        branches = union(chain(window, view.end), chain(copied, view.end))
        return Proposal(given.grow(branches), len(given))

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> Any:
        refined = [int(scores.best[i, 0]) for i in range(min(self.size + 1, len(scores.nodes)))]
        return (refined[len(verdict.settled) :] + [1] * self.size)[: self.size]


class Heads(Drafter):
    """Heads on the hidden state of the last accepted node, taken from the pages."""

    def demand(self, view: View) -> Demand:
        return _demand(view, 2)

    def propose(self, view: View, budget: int) -> Rounds:
        yield from ()
        given = view.given()
        draft: list[int] = []
        if budget > 0 and view.num_uncomputed() == 1 and view.end >= 2:
            feature = view.feature(view.end - 2)
            if view.state is not None:  # the pages and the last pass tell the same story
                np.testing.assert_array_equal(feature, view.state)
            seed = int(feature.view(np.uint32)[0])
            draft = [(seed >> (5 * i)) % VOCABULARY for i in range(min(budget, 2))]
        proposal = Proposal(given.grow(chain(draft, view.end)), len(given))
        return proposal.with_wants(Wants(hidden=(1,)))

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> Any:
        return scores.hidden[1][verdict.keep[-1]]


class EarlyExit(Drafter):
    """The target's first layer drafts; its second goes on from there for all nodes at once."""

    length = 4

    def demand(self, view: View) -> Demand:
        return _demand(view, self.length)

    def propose(self, view: View, budget: int) -> Rounds:
        given = view.given()
        if budget <= 0:
            return Proposal(given, len(given))
        graph, states, token = given, [], TokenId(0)
        for i in range(budget + 1):
            if i > 0:
                graph = graph.grow(chain([token], view.end + i - 1))
            wants = Wants(nodes=(len(graph) - 1,), hidden=(1,))
            scores = yield Proposal(graph, len(given), layers=(0, 1), wants=wants)
            states.append(scores.hidden[1])
            token = scores.token(NodeId(len(graph) - 1))
        return Proposal(graph, len(given), layers=(1, 2), hidden=np.concatenate(states))


class Beam(Drafter):
    """The target's first layer drafts a tree and drops one of each level's nodes before it goes on."""

    depth, width = 3, 2

    def demand(self, view: View) -> Demand:
        return _demand(view, 12)

    def propose(self, view: View, budget: int) -> Rounds:
        given = view.given()
        if budget <= 0 or len(given) > 1:
            return Proposal(given, len(given))
        graph, states, level = given, np.zeros((0, 2), dtype=np.float32), [len(given) - 1]
        survivors: tuple[int, ...] | None = None
        for depth in range(self.depth + 1):
            wants = Wants(nodes=tuple(level), best=self.width, hidden=(1,))
            scores = yield Proposal(graph, 1, layers=(0, 1), wants=wants, survivors=survivors)
            states = np.concatenate([states, scores.hidden[1]])
            left = [node for i, node in enumerate(level) if i != 1]
            survivors = tuple(n for n in range(len(graph)) if n not in level or n in left)
            graph, states = graph.part(survivors), states[list(survivors)]
            if depth == self.depth or len(graph) + self.width * len(left) > budget + 1:
                break
            level = list(range(len(graph), len(graph) + self.width * len(left)))
            for node in left:
                for token in scores.candidates(NodeId(node)):
                    child = chain([token], view.end + depth)
                    graph = graph.grow(child, at=NodeId(survivors.index(node)))
        return Proposal(graph, 1, layers=(1, 2), hidden=states, survivors=survivors)


class WhileVerifying(Drafter):
    """The draft model goes on writing while the target scores what it wrote before."""

    models = ("draft",)
    length = 3

    def demand(self, view: View) -> Demand:
        return _demand(view, self.length)

    def propose(self, view: View, budget: int) -> Rounds:
        given, own = view.given(), view.given("draft")
        draft = list(view.state or [])[:budget]
        while len(draft) < budget:
            draft.append((yield from self._next(own, draft, view)))
        return Proposal(given.grow(chain(draft, view.end)), len(given))

    def _next(
        self, own: TokenGraph, draft: list[int], view: View
    ) -> Generator[Proposal, Scores, int]:
        graph = own.grow(chain(draft, view.end))
        wants = Wants(nodes=(len(graph) - 1,))
        scores = yield Proposal(graph, len(own), "draft", wants=wants)
        return scores.token(NodeId(len(graph) - 1))

    def draft_ahead(self, view: View, proposal: Proposal) -> Generator[Proposal, Scores, Any]:
        draft = [int(t) for t in proposal.graph.tokens[proposal.given :]]
        own = view.given("draft")
        if not draft:
            return []
        for _ in range(2):
            draft.append((yield from self._next(own, draft, view)))
        return draft

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> Any:
        written, settled = view.state or [], list(verdict.settled.values())
        return written[len(settled) :] if written[: len(settled)] == settled else []


class Forking(Match):
    """Match, and one fork at the node that settles the third token."""

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        verdict = super().accept(view, proposal, scores)
        third = view.prompt_length + 2
        if view.index == 0 and third in verdict.settled:
            node = next(n for n in verdict.keep if proposal.graph.positions[n] == third - 1)
            return replace(verdict, forks={node: 1})
        return verdict


class Siblings(Drafter):
    """Siblings draft for each other: the tokens that followed the last two elsewhere."""

    def demand(self, view: View) -> Demand:
        return _demand(view, 4)

    def propose(self, view: View, budget: int) -> Rounds:
        yield from ()
        given, ending, draft = view.given(), view.tokens[-2:], []
        for sibling in view.siblings if budget > 0 else ():
            said = sibling.tokens
            for i in range(sibling.prompt_length, len(said) - 2):
                if said[i : i + 2] == ending:
                    draft = said[i + 2 : i + 2 + budget]
        return Proposal(given.grow(chain(draft, view.end)), len(given))


# --- masked models --------------------------------------------------------------------------------


def _filled(view: View, position: int) -> int:
    token = view.token_at(position)
    return MASK if token is None else int(token)


class MaskedBlock(Drafter):
    """A block of masks, filled in over several passes; KV is kept once it is plain tokens."""

    masked_models = (TARGET,)
    size = 4

    def area(self, view: View) -> range:
        """The positions of the block that is being filled."""
        start = view.end // self.size * self.size
        return range(start, start + self.size)

    def demand(self, view: View) -> Demand:
        return Demand(min_nodes=self.size, max_nodes=self.size, gain=1.0)

    def propose(self, view: View, budget: int) -> Rounds:
        yield from ()
        given = view.given()
        if budget <= 0:
            return Proposal(given, len(given), offset=0)
        canvas = block([_filled(view, p) for p in self.area(view)], positions=self.area(view))
        return Proposal(given.grow(canvas), len(given), offset=0, wants=Wants(logprobs=0))


def _predictions(graph: TokenGraph, scores: Scores, nodes: range) -> list[tuple[float, int, int]]:
    """(confidence, position, token) of the masked nodes, surest first."""
    found = []
    for node in nodes:
        if graph.tokens[node] == MASK:
            row = scores.row(NodeId(node))
            ((token, value), *_) = scores.logprobs[row]
            found.append((value, int(graph.positions[node]), token))
    return sorted(found, key=lambda g: (-g[0], g[1]))


class Unmask(Acceptor):
    """Settles the surest masks, `count` of them per pass."""

    def __init__(self, count: int = 1) -> None:
        self.count = count

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        nodes = range(proposal.given, len(proposal.graph))
        chosen = _predictions(proposal.graph, scores, nodes)[: self.count]
        return Verdict(
            settled={Position(p): TokenId(t) for _, p, t in chosen},
            keep=tuple(NodeId(i) for i in range(proposal.given)),
        )


class AssumedBlocks(MaskedBlock):
    """The block as it is, next to the block as it will be if the next prediction holds."""

    def demand(self, view: View) -> Demand:
        return Demand(min_nodes=self.size, max_nodes=2 * self.size, gain=2.0)

    def propose(self, view: View, budget: int) -> Rounds:
        proposal = yield from super().propose(view, budget)
        area = self.area(view)
        if budget < 2 * self.size or not view.state or view.state[0] not in area:
            return proposal
        position, token = view.state
        now = [_filled(view, p) for p in area]
        if now[position - area.start] != MASK:
            return proposal
        then = [token if p == position else t for p, t in zip(area, now, strict=True)]
        both = alternatives(block(now, positions=area), block(then, positions=area))
        return replace(proposal, graph=view.given().grow(both))

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> Any:
        nodes = range(proposal.given, proposal.given + self.size)
        left = [
            g for g in _predictions(proposal.graph, scores, nodes) if g[1] not in verdict.settled
        ]
        return (left[0][1], left[0][2]) if left else None


class VerifyAssumed(Unmask):
    """One step of `Unmask`, and a second one if the first did what the other block assumed."""

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        size, start, graph = MaskedBlock.size, proposal.given, proposal.graph
        [(_, position, token), *_] = _predictions(graph, scores, range(start, start + size))
        settled = {Position(position): TokenId(token)}
        assumed = range(start + size, len(graph))
        if any(graph.positions[n] == position and graph.tokens[n] == token for n in assumed):
            for _, p, t in _predictions(graph, scores, assumed)[:1]:
                settled[Position(p)] = TokenId(t)
        return Verdict(settled=settled, keep=tuple(NodeId(i) for i in range(start)))


class Pipeline(MaskedBlock):
    """Two blocks at once: the second starts before the first is done."""

    def demand(self, view: View) -> Demand:
        return Demand(min_nodes=self.size, max_nodes=2 * self.size, gain=2.0)

    def propose(self, view: View, budget: int) -> Rounds:
        proposal = yield from super().propose(view, budget)
        if budget < 2 * self.size:
            return proposal
        area = range(self.area(view).stop, self.area(view).stop + self.size)
        second = block([_filled(view, p) for p in area], positions=area)
        return replace(proposal, graph=proposal.graph.grow(second))


class OutOfOrder(Drafter):
    """Causal attention over tokens in the order in which they were settled, not of positions."""

    masked_models = (TARGET,)
    window = 4

    def demand(self, view: View) -> Demand:
        return Demand(min_nodes=2 * self.window, max_nodes=2 * self.window, gain=2.0)

    def propose(self, view: View, budget: int) -> Rounds:
        yield from ()
        given = view.given()
        if budget <= 0:
            return Proposal(given, len(given), offset=0)
        kept = set(view.kept())
        ready = [p for p in sorted(view.canvas) if p not in kept]
        masks = [p for p in range(view.end, view.end + 2 * self.window) if p not in view.canvas]
        masks = masks[: self.window]
        graph = given.grow(chain([view.canvas[p] for p in ready], positions=ready))
        count = len(graph)
        graph = graph.grow(chain([MASK] * len(masks), positions=masks))
        return Proposal(graph, count, offset=0, wants=Wants(logprobs=0))


class DualCache(MaskedBlock):
    """A model that sees everything: what lies outside the block is reused although it is stale."""

    refresh = 3

    def demand(self, view: View) -> Demand:
        return Demand(min_nodes=view.limit, max_nodes=view.limit, gain=1.0)

    def propose(self, view: View, budget: int) -> Rounds:
        yield from ()
        fresh = view.steps % self.refresh and len(view.kept()) > 0
        places = self.area(view) if fresh else range(view.limit)
        places = range(places.start, min(places.stop, view.limit))
        graph = block([_filled(view, p) for p in places], positions=places)
        return Proposal(graph, 0, offset=0, wants=Wants(logprobs=0))


class UnmaskAndReuse(Acceptor):
    """Settles the surest mask of the block in front and keeps all KV for reuse."""

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        graph = proposal.graph
        end = (view.end // MaskedBlock.size + 1) * MaskedBlock.size
        found = [g for g in _predictions(graph, scores, range(len(graph))) if g[1] < end]
        _, position, token = found[0]
        return Verdict(
            settled={Position(position): TokenId(token)},
            reuse=tuple(NodeId(i) for i in range(len(graph))),
        )
