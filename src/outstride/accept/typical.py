"""Typical acceptance: a drafted token stays if the target finds it likely enough. Lossy."""

from __future__ import annotations

import numpy as np

from outstride.core.contracts import Acceptor
from outstride.core.graph import FloatArray, NodeId, Position, TokenId
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sequence import View
from outstride.registry import acceptor


@acceptor("typical")
class Typical(Acceptor):
    """Takes the longest path of tokens above min(epsilon, delta * exp(-entropy)), then one more."""

    def __init__(self, *, epsilon: float, delta: float) -> None:
        self.epsilon = epsilon
        self.delta = delta

    def bar(self, p: FloatArray) -> float:
        """How likely a token must be."""
        some = p[p > 0].astype(np.float64)
        entropy = -float((some * np.log(some)).sum())
        return min(self.epsilon, self.delta * float(np.exp(-entropy)))

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        graph, end = proposal.graph, proposal.root
        depth = {end: 0}
        for node in map(NodeId, range(proposal.given, len(graph))):
            above = NodeId(int(graph.parents[node]))
            if above not in depth:
                continue
            p = scores.probabilities(above)
            if p[graph.tokens[node]] >= self.bar(p):
                depth[node] = depth[above] + 1
                if depth[node] > depth[end]:
                    end = node
        path = graph.path(end)
        settled = {
            Position(int(graph.positions[node])): TokenId(int(graph.tokens[node]))
            for node in path[proposal.given :]
        }
        settled[Position(int(graph.positions[end]) + 1)] = scores.token(end)
        return Verdict(settled=settled, keep=tuple(path))
