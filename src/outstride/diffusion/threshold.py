"""`threshold`: settle every prediction above a probability."""

from __future__ import annotations

from outstride.core.proposal import Proposal, Scores
from outstride.core.sequence import View
from outstride.diffusion.unmasker import Prediction, Unmasker
from outstride.registry import method


@method("threshold", family="diffusion")
class ThresholdUnmasker(Unmasker):
    """Settles every position whose token has at least the probability `threshold`, and always one.

    Tokens that are settled together did not see each other; where each is nearly certain, their
    product is near their joint probability.

    Paper: Fast-dLLM (Wu et al., 2025); confident decoding of Dimple (Yu et al., 2025)
    Exactness: lossy
    Needs: a masked model
    Cost per step: one block, for as many tokens as are sure
    """

    def __init__(
        self,
        *,
        threshold: float = 0.9,
        block: int = 0,
        cache: str = "none",
        refresh: int = 0,
    ) -> None:
        super().__init__(block=block, cache=cache, refresh=refresh)
        if not 0 < threshold <= 1:
            raise ValueError("needs 0 < threshold <= 1")
        self.threshold = threshold

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Prediction]
    ) -> list[Prediction]:
        return [prediction for prediction in found if prediction.probability >= self.threshold]
