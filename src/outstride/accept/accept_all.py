"""Accepts every drafted token unchecked. Lossy."""

from __future__ import annotations

from outstride.core.contracts import Acceptor
from outstride.core.graph import NodeId, Position, TokenId
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sequence import View
from outstride.registry import acceptor


@acceptor("all")
class AcceptAll(Acceptor):
    """Settles a drafted chain unchecked, and the target's own token after it."""

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        graph, last = proposal.graph, NodeId(len(proposal.graph) - 1)
        settled = {
            Position(int(graph.positions[node])): TokenId(int(graph.tokens[node]))
            for node in range(proposal.given, len(graph))
        }
        settled[Position(int(graph.positions[last]) + 1)] = scores.token(last)
        return Verdict(settled=settled, keep=tuple(NodeId(i) for i in range(len(graph))))
