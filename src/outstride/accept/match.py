"""Verification by equality: a drafted token is accepted if it is the target's own token."""

from __future__ import annotations

from typing import cast

from outstride.core.contracts import Acceptor
from outstride.core.graph import NodeId, Position, TokenId
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sequence import View
from outstride.registry import acceptor


@acceptor("match")
class Match(Acceptor):
    """Walks down the tree along the target's own tokens, as far as they were drafted.

    The target's token is the argmax or the seeded sample, whose noise depends on the position alone.
    So the walk settles exactly the tokens of plain decoding, one more than it matched (the bonus).
    """

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        graph, node = proposal.graph, proposal.root
        keep = cast("list[NodeId]", list(range(proposal.given)))
        settled: dict[Position, TokenId] = {}
        while True:
            token = scores.token(node)
            settled[Position(int(graph.positions[node]) + proposal.offset)] = token
            child = graph.follow(node, token)
            if child is None:
                return Verdict(settled=settled, keep=tuple(keep))
            keep.append(child)
            node = child
