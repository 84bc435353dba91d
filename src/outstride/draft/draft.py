"""A smaller model of the same vocabulary writes the draft."""

from __future__ import annotations

import math

import numpy as np

from outstride.core.contracts import Guessing, Rounds
from outstride.core.graph import NodeId
from outstride.core.guess import Guess, Sign
from outstride.core.proposal import Scores, Wants
from outstride.core.sampling import Draw
from outstride.core.sequence import View
from outstride.draft.writer import Branch, Writer, leading, noise_of, pruned
from outstride.registry import method

UNTOLD = 0.7
"""The chance of a token when the draft model was not asked how sure it is."""


def chances(view: View, scores: Scores, node: NodeId, at: int) -> list[float]:
    """How likely the target is to agree with each of a node's rivals, as the draft model sees it.

    Greedy, a token's chance is its probability. Sampled, the noise that both models share is known
    already and decides together with the logits; two models differ less than that noise spreads,
    hence the square.
    """
    tokens, known = scores.rivals(node), dict(scores.logprobs[scores.row(node)])
    floor = min(known.values())
    values = np.asarray([known.get(token, floor) for token in tokens])
    rest = max(0.0, 1.0 - float(np.exp(values).sum()))
    if (warmth := view.params.temperature) > 0:
        noise = noise_of(Draw(seed=view.seed, index=view.index), at, tokens)
        values, rest = 2.0 * (values + warmth * noise), rest**2
    weights = np.exp(values)
    return [float(weight) for weight in weights / (weights.sum() + rest)]


@method("draft", family="draft model")
class Draft(Writer):
    """A smaller model writes a chain, or a tree of its likeliest paths, for the target to check.

    It samples with the request's own temperature, filters and noise, so that sampled drafts agree
    with the target as often as greedy ones. Siblings are the top-k of logit plus noise, hence drawn
    without replacement; paths compete by the product of their tokens' chances, noise included: the
    `width` best of a level are continued, and the `nodes` best of all (0: as many as there are) are
    sent. A draft ends early where no path's chance reaches `least`.

    Paper: Speculative Decoding (Leviathan et al., 2023); Speculative Sampling (Chen et al., 2023);
      trees as in SpecInfer (Miao et al., 2024), with RSD's Gumbel top-k siblings and beams (Jeon et
      al., 2024); early ends as in SpecDec++ (Huang et al., 2024), without its trained head
    Exactness: exact
    Needs: draft model
    Cost per step: `length` passes of the draft model, shared by all sequences that use it, and up to
      width + (length - 1) * width**2 further nodes of the target
    """

    trimmable = True  # `propose` is the guess; without room, its model only reads along

    def __init__(
        self, *, model: str, length: int = 4, width: int = 1, nodes: int = 0, least: float = 0.0
    ) -> None:
        super().__init__(model=model, length=length, width=width)
        if nodes < 0 or not 0.0 <= least < 1.0:
            raise ValueError("needs nodes >= 0 and 0 <= least < 1")
        self.nodes = nodes
        self.least = math.log(least) if least else -math.inf
        # A bare chain asks for tokens and nothing else: no row of the vocabulary leaves the pass.
        self.weighs = width > 1 or least > 0
        self.asks = Wants(best=width, logprobs=4 * width if self.weighs else None)

    def most(self, depth: int) -> int:
        most = self.width + (depth - 1) * self.width**2 if depth > 0 else 0
        return min(most, self.nodes) if self.nodes else most

    def branches(self, view: View, scores: Scores, above: Branch, at: int) -> list[Branch]:
        tokens = scores.rivals(above.node)
        weighed = chances(view, scores, above.node, at) if self.weighs else [UNTOLD]
        found = []
        for rank, (token, chance) in enumerate(zip(tokens, weighed, strict=True)):
            score = above.score + math.log(max(chance, 1e-9))
            found.append(Branch(token, above.place, rank=rank, score=score, chance=chance))
        return found

    def sift(self, fresh: list[Branch]) -> tuple[list[Branch], list[Branch]]:
        going = leading(fresh, self.width)
        return fresh, [branch for branch in going if branch.score >= self.least]

    def guess(self, view: View, room: int) -> Guessing:
        written = yield from self.write(view, room)
        guess, depths = Guess(), {-1: 0}
        for i, branch in enumerate(pruned(written, min(room, self.nodes or room))):
            depths[i] = depths[branch.parent] + 1
            sure = int(8 * branch.chance) if self.weighs else -1
            sign = Sign("draft", (branch.rank, min(depths[i], 4), sure))
            guess.add(branch.token, branch.parent, sign, branch.chance)
        return guess

    def propose(self, view: View, room: int) -> Rounds:
        guess = yield from self.guess(view, room)  # without room it still reads along
        return guess.proposal(view, self.wants)
