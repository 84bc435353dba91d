"""Block verification: rejection sampling over a whole chain."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from outstride.accept.rejection_sampling import block
from outstride.core.contracts import Acceptor
from outstride.core.graph import NodeId, Position, TokenId
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sampling import Purpose, independent, sample, uniform
from outstride.core.sequence import View
from outstride.registry import acceptor


@acceptor("block")
class BlockVerification(Acceptor):
    """Accepts the longest prefix of a chain that holds as a whole, and keeps the distribution.

    The decision looks at the whole draft, beyond the tokens that it accepts. So all noise is keyed by
    the step: the next step samples at some of the same positions and must not use it again.
    """

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        graph, root = proposal.graph, proposal.root
        count, start = len(graph) - proposal.given, int(graph.positions[root]) + 1
        own = independent(proposal.sampling, view.steps)
        length = 0
        if count:
            nodes = range(root, len(graph))
            p = np.asarray([scores.probabilities(NodeId(i)) for i in nodes], dtype=np.float64)
            q = np.asarray([proposal.drafted[i] for i in nodes[1:]], dtype=np.float64)
            noise = replace(own, purpose=Purpose.ACCEPT)
            draws = np.asarray([uniform(noise, start + i) for i in range(count)])
            lengths, rest = block(p[None], q[None], graph.tokens[None, nodes[1:]], draws[None])
            length = int(lengths[0])
        kept = proposal.given + length
        settled = {
            Position(int(graph.positions[i])): TokenId(int(graph.tokens[i]))
            for i in range(proposal.given, kept)
        }
        if length == count:
            settled[Position(start + length)] = scores.token(NodeId(kept - 1))
        else:
            residual = replace(own, purpose=Purpose.RESIDUAL)
            token = sample(rest[0].astype(np.float32), residual, start + length)
            settled[Position(start + length)] = TokenId(token)
        return Verdict(settled=settled, keep=tuple(NodeId(i) for i in range(kept)))
