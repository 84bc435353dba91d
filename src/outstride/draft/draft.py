"""`draft`: a smaller model of the same vocabulary drafts a chain or a tree."""

from __future__ import annotations

import math

import numpy as np

from outstride.core.contracts import DraftRounds, Rounds
from outstride.core.draft_tree import AcceptanceKey, DraftTree
from outstride.core.graph import NodeId
from outstride.core.proposal import Scores, Wants
from outstride.core.sampling import SHARED_NOISE_SHARPNESS, SamplingSpec
from outstride.core.sequence import View
from outstride.draft.tree_expansion import (
    Branch,
    DraftModelExpansion,
    best_branches,
    best_paths,
    noise_of,
)
from outstride.registry import method

DEFAULT_RATE = 0.7
"""The acceptance rate of a token when the draft model's probabilities were not asked for."""


def agreement_rates(view: View, scores: Scores, node: NodeId, at: int) -> list[float]:
    """How likely the target is to agree with each of a node's candidates, by the draft model.

    Greedy, the rate of a token is its probability. Sampled, the noise that both models share is known
    already and decides together with the logits, see `SHARED_NOISE_SHARPNESS`.
    """
    tokens, known = scores.candidates(node), dict(scores.logprobs[scores.row(node)])
    floor = min(known.values())
    values = np.asarray([known.get(token, floor) for token in tokens])
    rest = max(0.0, 1.0 - float(np.exp(values).sum()))
    if (temperature := view.params.temperature) > 0:
        noise = noise_of(SamplingSpec(seed=view.seed, index=view.index), at, tokens)
        values = SHARED_NOISE_SHARPNESS * (values + temperature * noise)
        rest = rest**SHARED_NOISE_SHARPNESS
    weights = np.exp(values)
    return [float(weight) for weight in weights / (weights.sum() + rest)]


@method("draft", family="draft model")
class DraftModelDrafter(DraftModelExpansion):
    """A smaller model writes a chain, or a tree of its likeliest paths, for the target to check.

    It samples with the request's own temperature, filters and noise, so that sampled drafts agree
    with the target as often as greedy ones. Siblings are the top-k of logit plus noise, hence drawn
    without replacement; paths compete by the product of their tokens' acceptance rates, noise
    included: the `width` best of a level are continued, and the `nodes` best of all (0: as many as
    there are) are sent. A draft ends early where no path's rate reaches `min_prob`.

    Paper: Speculative Decoding (Leviathan et al., 2023); Speculative Sampling (Chen et al., 2023);
      trees as in SpecInfer (Miao et al., 2024), with RSD's Gumbel top-k siblings and beams (Jeon et
      al., 2024); early ends as in SpecDec++ (Huang et al., 2024), without its trained head
    Exactness: exact
    Needs: draft model
    Cost per step: `length` passes of the draft model, shared by all sequences that use it, and up to
      width + (length - 1) * width**2 further nodes of the target
    """

    prunable = True  # `propose` is the draft tree; without budget, its model only prefills

    def __init__(
        self, *, model: str, length: int = 4, width: int = 1, nodes: int = 0, min_prob: float = 0.0
    ) -> None:
        super().__init__(model=model, length=length, width=width)
        if nodes < 0 or not 0.0 <= min_prob < 1.0:
            raise ValueError("needs nodes >= 0 and 0 <= min_prob < 1")
        self.nodes = nodes
        self.min_score = math.log(min_prob) if min_prob else -math.inf
        # A bare chain asks for tokens and nothing else: no row of the vocabulary leaves the pass.
        self.rated = width > 1 or min_prob > 0
        self.asks = Wants(best=width, logprobs=4 * width if self.rated else None)

    def max_nodes(self, depth: int) -> int:
        count = self.width + (depth - 1) * self.width**2 if depth > 0 else 0
        return min(count, self.nodes) if self.nodes else count

    def branches(self, view: View, scores: Scores, above: Branch, at: int) -> list[Branch]:
        tokens = scores.candidates(above.node)
        rates = agreement_rates(view, scores, above.node, at) if self.rated else [DEFAULT_RATE]
        found = []
        for rank, (token, rate) in enumerate(zip(tokens, rates, strict=True)):
            score = above.score + math.log(max(rate, 1e-9))
            found.append(Branch(token, above.place, rank=rank, score=score, rate=rate))
        return found

    def select(self, fresh: list[Branch]) -> tuple[list[Branch], list[Branch]]:
        best = best_branches(fresh, self.width)
        return fresh, [branch for branch in best if branch.score >= self.min_score]

    def draft_tree(self, view: View, budget: int) -> DraftRounds:
        drafted = yield from self.expand(view, budget)
        found, depths = DraftTree(), {-1: 0}
        for i, branch in enumerate(best_paths(drafted, min(budget, self.nodes or budget))):
            depths[i] = depths[branch.parent] + 1
            confidence = int(8 * branch.rate) if self.rated else -1
            key = AcceptanceKey("draft", (branch.rank, min(depths[i], 4), confidence))
            found.add(branch.token, branch.parent, key, branch.rate)
        return found

    def propose(self, view: View, budget: int) -> Rounds:
        drafted = yield from self.draft_tree(view, budget)  # without budget it still prefills
        return drafted.proposal(view, self.wants)
