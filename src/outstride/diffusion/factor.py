"""`factor`: the more predictions are settled together, the surer each has to be."""

from __future__ import annotations

from outstride.core.proposal import Proposal, Scores
from outstride.core.sequence import View
from outstride.diffusion.unmasker import Prediction, Unmasker, by_confidence
from outstride.registry import method


@method("factor", family="diffusion")
class FactorUnmasker(Unmasker):
    """Settles the n surest positions for the largest n with (n + 1) * (1 - c) < `factor`.

    c is the probability of the least sure of them: the more tokens are settled together, the surer
    each has to be. A larger factor settles more.

    Paper: Fast-dLLM (Wu et al., 2025), its factor-based rule
    Exactness: lossy
    Needs: a masked model
    Cost per step: one block, for as many tokens as the rule allows
    """

    def __init__(
        self, *, factor: float = 1.0, block: int = 0, cache: str = "none", refresh: int = 0
    ) -> None:
        super().__init__(block=block, cache=cache, refresh=refresh)
        if factor <= 0:
            raise ValueError("needs factor > 0")
        self.factor = factor

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Prediction]
    ) -> list[Prediction]:
        order = by_confidence(found)
        fits = [
            n
            for n, prediction in enumerate(order, start=1)
            if (n + 1) * (1 - prediction.probability) < self.factor
        ]
        return order[: max(fits, default=0)]
