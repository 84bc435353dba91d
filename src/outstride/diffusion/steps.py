"""`steps`: a fixed number of tokens per pass, the schedule that published models are decoded with."""

from __future__ import annotations

from outstride.core.proposal import Proposal, Scores, Wants
from outstride.core.sequence import View
from outstride.diffusion.canvas import CanvasState
from outstride.diffusion.unmasker import Prediction, Unmasker, ranked
from outstride.registry import method

ASKS = {
    "confidence": Wants(logprobs=0),
    "margin": Wants(logprobs=2),
    "entropy": Wants(logprobs=0, logits=True),
    "random": Wants(logprobs=0),
    "steady": Wants(logprobs=0),
}
"""What each order needs to know of a position."""


@method("steps", family="diffusion")
class StepsUnmasker(Unmasker):
    """Fills in a block of masks, a fixed number of tokens per pass: the default of masked models.

    Each pass settles the `count` positions that come first by `order`: by confidence (the probability
    of the chosen token, as published), margin (its lead over the next), entropy, at random, or
    steady: by confidence to two places, and of equals the leftmost, an order that hardly changes from
    pass to pass. The text depends on this schedule, so it is the text that `verify` is exact to, as
    others are exact to `plain`.

    Paper: LLaDA (Nie et al., 2025); Dream (Ye et al., 2025); margins after Kim et al. (2025)
    Exactness: exact to steps, by definition
    Needs: a masked model
    Cost per step: one block (a full canvas: all of it) for `count` tokens
    """

    def __init__(self, *, count: int = 1, order: str = "steady", block: int = 0) -> None:
        super().__init__(block=block)
        if count < 1 or order not in ASKS:
            raise ValueError(f"needs count >= 1 and order one of {', '.join(ASKS)}")
        self.count = count
        self.order = order
        self.asks = ASKS[order]

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Prediction]
    ) -> list[Prediction]:
        num_settled = CanvasState(view).num_settled
        return ranked(found, scores, self.order, view, num_settled)[: self.count]
