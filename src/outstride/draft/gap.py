"""The model knows the answer before it has written it."""

from __future__ import annotations

from outstride.core.canvas import Sheet
from outstride.core.proposal import Wants
from outstride.core.sequence import View
from outstride.draft.canvas import Canvas
from outstride.registry import method


@method("gap", family="diffusion", acceptor="gap")
class Gap(Canvas):
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

    def scored(self, view: View) -> list[int]:
        if view.block() is None:
            return super().scored(view)
        sheet = Sheet(view)
        return sheet.open(sheet.window())
