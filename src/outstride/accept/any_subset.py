"""Parallel draws, checked one behind the other: keeps the joint distribution."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from outstride.accept.unmask import Guess, Unmask, guesses
from outstride.core.canvas import recall
from outstride.core.graph import FloatArray, NodeId, Position, TokenId
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sampling import Purpose, sample, uniform
from outstride.core.sequence import View
from outstride.registry import acceptor


@dataclass(frozen=True, slots=True)
class Drafts:
    """What was drawn and is to be checked, in order, by position."""

    tokens: dict[int, int]
    rows: dict[int, FloatArray]


@acceptor("any-subset")
class AnySubset(Unmask):
    """Settles the first draw; a pass later, as many of the others as the rule of rejection keeps."""

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Guess]
    ) -> list[Guess]:
        return found[:1]

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        drafts: Drafts | None = recall(view).note
        found = {guess.node: guess for guess in guesses(proposal, scores)}
        draws = [found[node] for node in sorted(found)]
        if not draws:
            keep = tuple(NodeId(node) for node in range(proposal.given))
            return Verdict(keep=keep, note=drafts)
        if drafts is None:
            return self._draw(view, proposal, scores, draws)
        return self._check(view, proposal, scores, draws, drafts)

    def _draw(self, view: View, proposal: Proposal, scores: Scores, draws: list[Guess]) -> Verdict:
        first, *rest = draws
        if view.closing(first.position, first.token):
            rest = [guess for guess in rest if guess.position < first.position]
        rows = {g.position: scores.probabilities(g.node) for g in rest}
        return Verdict(
            settled={Position(first.position): TokenId(first.token)},
            keep=tuple(NodeId(node) for node in range(proposal.given)),
            nodes={Position(first.position): first.node},
            note=Drafts({g.position: g.token for g in rest}, rows) if rest else None,
        )

    def _check(
        self, view: View, proposal: Proposal, scores: Scores, draws: list[Guess], drafts: Drafts
    ) -> Verdict:
        keep = [NodeId(node) for node in range(proposal.given)]
        settled: dict[Position, TokenId] = {}
        nodes: dict[Position, NodeId] = {}
        for guess in draws:
            position, token = Position(guess.position), drafts.tokens[guess.position]
            p, q = scores.probabilities(guess.node), drafts.rows[guess.position]
            nodes[position] = guess.node
            chance = uniform(replace(proposal.draw, purpose=Purpose.ACCEPT), position)
            if chance * float(q[token]) < float(p[token]):
                settled[position] = TokenId(token)
                keep.append(NodeId(guess.node + 1))  # the draw stands behind its mask
                if view.closing(position, token):
                    break
                continue
            rest = np.maximum(p - q, np.float32(0.0))
            residual = replace(proposal.draw, purpose=Purpose.RESIDUAL)
            settled[position] = TokenId(sample(rest if rest.any() else p, residual, position))
            break
        return Verdict(settled=settled, keep=tuple(keep), nodes=nodes)
