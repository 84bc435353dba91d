"""A run of tokens that the model is sure of. Lossy."""

from __future__ import annotations

import math

from outstride.core.contracts import Acceptor
from outstride.core.graph import NodeId, Position, TokenId
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sequence import View
from outstride.registry import acceptor


@acceptor("confident")
class Confident(Acceptor):
    """Settles the next token, and those guessed behind it for as long as each is sure enough."""

    def __init__(self, *, sure: float) -> None:
        self.sure = sure

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        graph = proposal.graph
        settled: dict[Position, TokenId] = {}
        for node in map(NodeId, range(proposal.root, len(graph))):
            ((token, value), *_) = scores.logprobs[scores.row(node)]
            if settled and value < math.log(self.sure):
                break
            settled[Position(int(graph.positions[node]) + 1)] = TokenId(token)
        return Verdict(settled=settled, keep=tuple(NodeId(i) for i in range(proposal.given)))
