"""Rival beginnings: the one with the longest matching draft stays. Lossy."""

from __future__ import annotations

from outstride.core.contracts import Acceptor
from outstride.core.graph import NodeId, Position, TokenId
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sequence import View
from outstride.registry import acceptor


@acceptor("rooted")
class Rooted(Acceptor):
    """Walks down from every first token along the target's own; the longest walk is settled.

    The target's token behind it is not: it stays open, together with its rivals, for the next draft.
    """

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        graph = proposal.graph
        longest: list[NodeId] = []
        for first in graph.children(proposal.root):
            walk, node = [first], graph.follow(first, scores.token(first))
            while node is not None:
                walk.append(node)
                node = graph.follow(node, scores.token(node))
            longest = max(longest, walk, key=len)
        settled = {
            Position(int(graph.positions[node])): TokenId(int(graph.tokens[node]))
            for node in longest
        }
        keep = [NodeId(i) for i in range(proposal.given)]
        return Verdict(settled=settled, keep=(*keep, *longest))
