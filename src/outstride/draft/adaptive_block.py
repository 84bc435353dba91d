"""The size of a block follows the text."""

from __future__ import annotations

from outstride.core.canvas import Sheet, recall
from outstride.core.sequence import View
from outstride.draft.canvas import Canvas
from outstride.registry import method


@method("adaptive-block", family="diffusion", acceptor="adaptive-block")
class AdaptiveBlock(Canvas):
    """Ends blocks where the model itself expects a step of the text to end.

    When a block begins, its border is drawn within the next `block` positions: behind the surest guess
    that is one of the `delimiters` (token ids joined by +, such as those of line breaks) with at least
    the probability `sure`. With none named, behind the place where confidence falls most, at least
    `shortest` positions on. Within the block, positions are settled by `threshold`.

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

    def front(self, view: View) -> range:
        sheet = Sheet(view)
        border: int | None = recall(view).note
        stop = border if border is not None and border > sheet.end else sheet.end + self.block
        if view.block() is not None:
            stop = min(stop, sheet.window().stop)
        return range(sheet.end, min(stop, sheet.stop))
