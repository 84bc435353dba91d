"""`pipeline`: later blocks begin before earlier ones are complete."""

from __future__ import annotations

from collections.abc import Sequence

from outstride.core.proposal import Proposal, Scores
from outstride.core.sequence import View
from outstride.diffusion.canvas import CanvasState, block_of
from outstride.diffusion.unmasker import Prediction, Unmasker, by_confidence
from outstride.registry import method


@method("pipeline", family="diffusion")
class PipelineUnmasker(Unmasker):
    """Fills in up to `depth` blocks at once: each begins when the share `start` of the last is settled.

    All settle what reaches the probability `threshold`; the first always settles something, a later
    one once the share `due` of its predecessor is settled. A model with causal attention takes a
    window of masks that moves on with the text, and computes tokens in the order in which they were
    settled: the KV of each is kept from then on. `penalty` raises the threshold per position of
    distance from the first gap. Only the decoding of both papers is here: the models are taken as
    they are, without D2F's distillation to blocks that see each other causally, and without WeDLM's
    training on reordered text.

    Paper: the decoding of D2F (Wang et al., 2025), without its distillation; that of WeDLM (Liu et
      al., 2025) for models with causal attention, without its training
    Exactness: lossy
    Needs: a masked model
    Cost per step: up to `depth` blocks
    """

    def __init__(
        self,
        *,
        threshold: float = 0.9,
        depth: int = 4,
        start: float = 0.1,
        due: float = 0.95,
        penalty: float = 0.0,
        block: int = 0,
    ) -> None:
        super().__init__(block=block)
        if not 0 < threshold <= 1 or depth < 1 or penalty < 0:
            raise ValueError("needs 0 < threshold <= 1, depth >= 1 and penalty >= 0")
        if not 0 <= start <= due <= 1:
            raise ValueError("needs 0 <= start <= due <= 1")
        self.threshold = threshold
        self.depth = depth
        self.start = start
        self.due = due
        self.penalty = penalty

    def _blocks(self, canvas: CanvasState) -> list[range]:
        return canvas.blocks(self.block, self.depth, self.start)

    def positions(self, view: View) -> list[Sequence[int]]:
        canvas = CanvasState(view)
        if block_of(view) is None or canvas.full:
            return super().positions(view)
        return list(self._blocks(canvas))

    def scored(self, view: View) -> list[int]:
        canvas = CanvasState(view)
        return [p for block in self._blocks(canvas) for p in canvas.open(block)]

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Prediction]
    ) -> list[Prediction]:
        canvas, chosen, done = CanvasState(view), list[Prediction](), 1.0
        for block in self._blocks(canvas):
            here = [p for p in found if p.position in block]
            sure = [p for p in here if p.probability >= self._threshold_at(canvas, p.position)]
            chosen += sure or (by_confidence(here)[:1] if done >= self.due else [])
            answer = [p for p in block if p >= view.prompt_length]
            done = 1.0 - len(canvas.open(answer)) / max(len(answer), 1)
        return chosen

    def _threshold_at(self, canvas: CanvasState, position: int) -> float:
        return self.threshold + self.penalty * (position - canvas.end)
