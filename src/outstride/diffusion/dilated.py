"""`dilated`: settle positions far from each other first, on a schedule that halves the distance."""

from __future__ import annotations

import math

from outstride.core.proposal import Proposal, Scores
from outstride.core.sequence import View
from outstride.diffusion.canvas import CanvasState
from outstride.diffusion.unmasker import Prediction, Unmasker
from outstride.registry import method


@method("dilated", family="diffusion")
class DilatedUnmasker(Unmasker):
    """Settles positions at a wide stride first, then those between them: a block in log(block) passes.

    Positions far from each other hardly depend on each other. The schedule is fixed: with `base` 2,
    every half block, every quarter, and so on down to neighbours. A prediction below the probability
    `min_prob` waits for a later round.

    Paper: DUS, dilated unmasking (Luxembourg et al., 2025)
    Exactness: lossy
    Needs: a masked model
    Cost per step: one block; the logarithm of its size in steps
    """

    def __init__(
        self,
        *,
        base: int = 2,
        min_prob: float = 0.0,
        block: int = 0,
        cache: str = "none",
        refresh: int = 0,
    ) -> None:
        super().__init__(block=block, cache=cache, refresh=refresh)
        if base < 2 or not 0 <= min_prob < 1:
            raise ValueError("needs base >= 2 and 0 <= min_prob < 1")
        self.base = base
        self.min_prob = min_prob

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Prediction]
    ) -> list[Prediction]:
        size = max(len(CanvasState(view).block(self.block)), 2)
        rounds = math.ceil(math.log(size, self.base))
        for stride in (-(-size // self.base ** (i + 1)) for i in range(rounds)):
            due = [p for p in found if (p.position - view.prompt_length) % stride == 0]
            if sure := [p for p in due if p.probability >= self.min_prob]:
                return sure
        return []
