"""`gap`: settle everything at once as soon as the lead of the best tokens is wide."""

from __future__ import annotations

from outstride.core.proposal import Proposal, Scores, Wants
from outstride.core.sequence import View
from outstride.diffusion.canvas import CanvasState, block_of
from outstride.diffusion.unmasker import Prediction, Unmasker, by_confidence
from outstride.registry import method


@method("gap", family="diffusion")
class GapUnmasker(Unmasker):
    """Settles `count` positions per pass until the lead of the best tokens is wide, then all the rest.

    The lead is the difference of the two best logits, averaged over all open positions of the pass. It
    has to reach `early` in the first third of the answer, `middle` in the second, `late` in the last.

    Paper: Prophet (Li et al., 2025)
    Exactness: lossy
    Needs: a masked model
    Cost per step: one block (a full canvas: all of it), every open position scored
    """

    asks = Wants(logprobs=2)

    def __init__(
        self,
        *,
        early: float = 7.5,
        middle: float = 5.0,
        late: float = 2.5,
        count: int = 1,
        block: int = 0,
    ) -> None:
        super().__init__(block=block)
        if min(early, middle, late) < 0 or count < 1:
            raise ValueError("needs early, middle and late >= 0 and count >= 1")
        self.thresholds = (early, middle, late)
        self.count = count

    def scored(self, view: View) -> list[int]:
        if block_of(view) is None:
            return super().scored(view)
        canvas = CanvasState(view)
        return canvas.open(canvas.window())

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Prediction]
    ) -> list[Prediction]:
        canvas = CanvasState(view)
        leads = []
        for prediction in found:
            first, second = (value for _, value in scores.logprobs[prediction.row][1:3])
            leads.append(first - second)
        progress = canvas.num_settled / max(view.limit - view.prompt_length, 1)
        if sum(leads) / len(leads) >= self.thresholds[min(int(3 * progress), 2)]:
            return found
        front = canvas.block(self.block)
        return by_confidence(p for p in found if p.position in front)[: self.count]
