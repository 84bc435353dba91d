"""`entropy-bound`: settle as many predictions as a bound on their joint error allows."""

from __future__ import annotations

from outstride.core.proposal import Proposal, Scores, Wants
from outstride.core.sequence import View
from outstride.core.softmax import entropy, softmax
from outstride.diffusion.unmasker import Prediction, Unmasker, logits_of
from outstride.registry import method


@method("entropy-bound", family="diffusion")
class EntropyBoundUnmasker(Unmasker):
    """Settles the positions of least entropy while what they could get wrong together is bounded.

    The bound is on the sum of their entropies less the largest, in nats: `bound`. That sum is an upper
    bound on the joint error of predictions that do not see each other. A single position is always
    within it; positions that are certain cost nothing.

    Paper: EB-Sampler (Ben-Hamu et al., 2025)
    Exactness: lossy
    Needs: a masked model
    Cost per step: one block, whole rows of logits, for as many tokens as the bound allows
    """

    asks = Wants(logprobs=0, logits=True)

    def __init__(
        self, *, bound: float = 0.1, block: int = 0, cache: str = "none", refresh: int = 0
    ) -> None:
        super().__init__(block=block, cache=cache, refresh=refresh)
        if bound < 0:
            raise ValueError("needs bound >= 0")
        self.bound = bound

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Prediction]
    ) -> list[Prediction]:
        entropies = {p.position: entropy(softmax(logits_of(scores, p))) for p in found}
        chosen: list[Prediction] = []
        total = 0.0
        for prediction in sorted(found, key=lambda p: (entropies[p.position], p.position)):
            if chosen and total > self.bound:  # the next entropy is the largest: it does not count
                break
            chosen.append(prediction)
            total += entropies[prediction.position]
        return chosen
