"""Candidates at every step of the way down a tree: rules that keep the distribution."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from outstride.accept.rules import Picked, Rows, in_turn, k_seq
from outstride.core.contracts import Acceptor
from outstride.core.graph import IntArray, NodeId, Position, TokenId
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sampling import Purpose, independent, sample, uniform
from outstride.core.sequence import View
from outstride.registry import acceptor


class Candidates(Acceptor):
    """Walks down the tree; at each node a rule takes one of the children, or none.

    Nodes with the same path are one place: their children are candidates together. Acceptance and
    residual draws have noise of their own, and fresh noise in every step.
    """

    def pick(self, p: Rows, q: Rows, tokens: IntArray, draws: Rows) -> Picked:
        """The rule: see `rules`."""
        raise NotImplementedError

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        graph, here = proposal.graph, [proposal.root]
        own = independent(proposal.draw, view.steps)
        chance = replace(own, purpose=Purpose.ACCEPT)
        settled: dict[Position, TokenId] = {}
        while True:
            position = Position(int(graph.positions[here[0]]) + 1)
            children = sorted(child for node in here for child in graph.children(node))
            if not children:
                settled[position] = scores.token(here[0])
                break
            tokens = graph.tokens[children]
            p = scores.probabilities(here[0]).astype(np.float64)
            q = proposal.drafted[children[0]].astype(np.float64)
            draws = np.asarray([uniform(chance, position, i) for i in range(len(children))])
            taken, rest = self.pick(p[None], q[None], tokens[None], draws[None])
            if taken[0] == len(children):
                residual = replace(own, purpose=Purpose.RESIDUAL)
                settled[position] = TokenId(sample(rest[0].astype(np.float32), residual, position))
                break
            settled[position] = TokenId(int(tokens[taken[0]]))
            here = [NodeId(child) for child in children if graph.tokens[child] == settled[position]]
        return Verdict(settled=settled, keep=tuple(graph.path(here[0])))


@acceptor("recursive")
class Recursive(Candidates):
    """The classic rule for siblings drawn without replacement, one after the other."""

    def pick(self, p: Rows, q: Rows, tokens: IntArray, draws: Rows) -> Picked:
        return in_turn(p, q, tokens, draws, again=False)


@acceptor("candidates")
class Independent(Candidates):
    """The classic rule for independent candidates, one after the other."""

    def pick(self, p: Rows, q: Rows, tokens: IntArray, draws: Rows) -> Picked:
        return in_turn(p, q, tokens, draws, again=True)


@acceptor("k-seq")
class KSeq(Candidates):
    """SpecTr's rule for independent candidates: the same threshold for all."""

    def pick(self, p: Rows, q: Rows, tokens: IntArray, draws: Rows) -> Picked:
        return k_seq(p, q, tokens, draws)
