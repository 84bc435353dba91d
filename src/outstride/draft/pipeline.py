"""Later blocks begin before earlier ones are finished."""

from __future__ import annotations

from collections.abc import Sequence

from outstride.core.canvas import Sheet
from outstride.core.sequence import View
from outstride.draft.canvas import Canvas
from outstride.registry import method


@method("pipeline", family="diffusion", acceptor="pipeline")
class Pipeline(Canvas):
    """Fills in up to `depth` blocks at once: each begins when the share `start` of the last is settled.

    All settle what reaches the probability `threshold`; the first always settles something, a later
    one once the share `due` of its predecessor is settled. A model with causal attention takes a
    window of masks that moves on with the text, and reads tokens in the order in which they were
    settled: each is kept as soon as it is read. `penalty` raises the threshold per position of
    distance from the first gap.

    Paper: D2F (Wang et al., 2025); WeDLM (Liu et al., 2025) for models with causal attention
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
        self.depth = depth
        self.start = start

    def _blocks(self, view: View) -> list[range]:
        return Sheet(view).blocks(self.block, self.depth, self.start)

    def places(self, view: View) -> list[Sequence[int]]:
        sheet = Sheet(view)
        if view.block() is None or sheet.full:
            return super().places(view)
        return list(self._blocks(view))

    def scored(self, view: View) -> list[int]:
        sheet = Sheet(view)
        return [p for block in self._blocks(view) for p in sheet.open(block)]
