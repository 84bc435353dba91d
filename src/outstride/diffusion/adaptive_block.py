"""`adaptive-block`: blocks end where the model itself expects a step of the text to end."""

from __future__ import annotations

from itertools import pairwise

from outstride.core.proposal import Proposal, Scores
from outstride.core.sequence import View
from outstride.diffusion.canvas import CanvasState, block_of, recall
from outstride.diffusion.unmasker import Prediction, Unmasker
from outstride.registry import method


@method("adaptive-block", family="diffusion")
class AdaptiveBlockUnmasker(Unmasker):
    """Ends blocks where the model itself expects a step of the text to end.

    When a block begins, its end is chosen within the next `block` positions: after the surest
    prediction that is one of the `delimiters` (token ids joined by +, such as those of line breaks)
    with at least the probability `sure`. Without delimiters, it is the position after which confidence
    falls most, at least `shortest` positions on. Within the block, positions are settled by
    `threshold`.

    Paper: AdaBlock-dLLM (Lu et al., 2025); borders by falling confidence are this project's reading
    Exactness: lossy
    Needs: a masked model
    Cost per step: one block of the model's (a full canvas: all of it)
    """

    def __init__(
        self,
        *,
        threshold: float = 0.9,
        delimiters: str = "",
        sure: float = 0.3,
        shortest: int = 4,
        block: int = 32,
    ) -> None:
        super().__init__(block=block)
        if not (0 < threshold <= 1 and 0 <= sure <= 1 and 1 <= shortest <= block):
            raise ValueError("needs 0 < threshold <= 1, 0 <= sure <= 1 and 1 <= shortest <= block")
        if any(part and not part.isdecimal() for part in delimiters.split("+")):
            raise ValueError("needs delimiters as token ids joined by +")
        self.threshold = threshold
        self.delimiters = {int(part) for part in delimiters.split("+") if part}
        self.sure = sure
        self.shortest = shortest

    def front(self, view: View) -> range:
        canvas = CanvasState(view)
        border: int | None = recall(view).note
        stop = border if border is not None and border > canvas.end else canvas.end + self.block
        if block_of(view) is not None:
            stop = min(stop, canvas.window().stop)
        return range(canvas.end, min(stop, canvas.stop))

    def _border(self, view: View, found: list[Prediction]) -> int:
        """Where the active block ends."""
        known: int | None = recall(view).note
        if known is not None and known > view.end:
            return known
        ends = [p for p in found if p.token in self.delimiters and p.probability >= self.sure]
        if ends:
            return max(ends, key=lambda p: (p.probability, -p.position)).position + 1
        within = found[self.shortest - 1 :]
        falls = [(a.probability - b.probability, -a.position) for a, b in pairwise(within)]
        if self.delimiters or not falls:
            return found[-1].position + 1
        return -max(falls)[1] + 1

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Prediction]
    ) -> list[Prediction]:
        border = self._border(view, found)
        here = [p for p in found if p.position < border] or found[:1]
        sure = [p for p in here if p.probability >= self.threshold]
        return sure or [max(here, key=lambda p: (p.logprob, -p.position))]

    def note(
        self,
        view: View,
        proposal: Proposal,
        scores: Scores,
        found: list[Prediction],
        settled: list[Prediction],
    ) -> int:
        return self._border(view, found)
