"""Rejection sampling over several candidates per position, down a token tree."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from outstride.accept.rejection_sampling import Picked, Rows, in_turn, k_seq
from outstride.core.contracts import Acceptor
from outstride.core.graph import IntArray, NodeId, Position, TokenId
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sampling import Purpose, independent, sample, uniform
from outstride.core.sequence import View
from outstride.registry import acceptor


class TreeRejection(Acceptor):
    """Walks down the tree; at each node a rule accepts one of the children, or none.

    The children of nodes with the same path are candidates together. Acceptance and residual samples
    have noise of their own, keyed by the step.
    """

    def pick(self, p: Rows, q: Rows, tokens: IntArray, draws: Rows) -> Picked:
        """The rule, one of `rejection_sampling`."""
        raise NotImplementedError

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        graph, here = proposal.graph, [proposal.root]
        own = independent(proposal.sampling, view.steps)
        noise = replace(own, purpose=Purpose.ACCEPT)
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
            draws = np.asarray([uniform(noise, position, i) for i in range(len(children))])
            taken, rest = self.pick(p[None], q[None], tokens[None], draws[None])
            if taken[0] == len(children):
                residual = replace(own, purpose=Purpose.RESIDUAL)
                settled[position] = TokenId(sample(rest[0].astype(np.float32), residual, position))
                break
            settled[position] = TokenId(int(tokens[taken[0]]))
            here = [NodeId(child) for child in children if graph.tokens[child] == settled[position]]
        return Verdict(settled=settled, keep=tuple(graph.path(here[0])))


@acceptor("recursive")
class RecursiveRejection(TreeRejection):
    """The classic rule, one sibling after the other, for siblings sampled without replacement."""

    def pick(self, p: Rows, q: Rows, tokens: IntArray, draws: Rows) -> Picked:
        return in_turn(p, q, tokens, draws, again=False)


@acceptor("candidates")
class IndependentRejection(TreeRejection):
    """The classic rule, one candidate after the other, for independent candidates."""

    def pick(self, p: Rows, q: Rows, tokens: IntArray, draws: Rows) -> Picked:
        return in_turn(p, q, tokens, draws, again=True)


@acceptor("k-seq")
class KSeqSelection(TreeRejection):
    """SpecTr's rule for independent candidates: the same threshold for all."""

    def pick(self, p: Rows, q: Rows, tokens: IntArray, draws: Rows) -> Picked:
        return k_seq(p, q, tokens, draws)
