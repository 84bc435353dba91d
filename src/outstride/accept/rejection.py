"""Speculative sampling's rejection rule: keeps the distribution, not the tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from outstride.core.contracts import Acceptor
from outstride.core.graph import FloatArray, NodeId, Position, TokenId
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sampling import Purpose, sample, uniform
from outstride.core.sequence import View
from outstride.registry import acceptor


@acceptor("rejection")
class RejectionSampler(Acceptor):
    """Accepts a drafted token with probability min(1, p/q), else samples the residual max(p - q, 0).

    Acceptance and residual samples have noise of their own: the drafter's noise would bias them. A
    drafted token without a distribution counts as certain: its q is 1.
    """

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        graph, node, sampling = proposal.graph, proposal.root, proposal.sampling
        keep = [NodeId(i) for i in range(proposal.given)]
        settled: dict[Position, TokenId] = {}
        while True:
            position = Position(int(graph.positions[node]) + 1)
            children = graph.children(node)
            if not children:
                settled[position] = scores.token(node)
                break
            child = children[0]
            token = TokenId(int(graph.tokens[child]))
            p = scores.probabilities(node)
            q: FloatArray | None = proposal.drafted.get(child)
            q_token = 1.0 if q is None else float(q[token])
            if uniform(replace(sampling, purpose=Purpose.ACCEPT), position) * q_token < float(
                p[token]
            ):
                settled[position] = token
                keep.append(child)
                node = child
                continue
            rest = p.copy()
            if q is None:
                rest[token] = 0.0
            else:
                rest = np.maximum(p - q, np.float32(0.0))
            if not rest.any():  # p and q differ by rounding alone
                rest = p
            residual = replace(sampling, purpose=Purpose.RESIDUAL)
            settled[position] = TokenId(sample(rest, residual, position))
            break
        return Verdict(settled=settled, keep=tuple(keep))
