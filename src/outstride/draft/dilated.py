"""Positions that hardly depend on each other, because they are far apart."""

from __future__ import annotations

from outstride.draft.canvas import Canvas
from outstride.registry import method


@method("dilated", family="diffusion", acceptor="dilated")
class Dilated(Canvas):
    """Settles positions at a wide stride first, then those between them: a block in log(block) passes.

    The schedule is fixed: with `base` 2, every half block, every quarter, and so on down to
    neighbours. A guess below the probability `least` waits for a later round.

    Paper: DUS, dilated unmasking (Luxembourg et al., 2025)
    Exactness: lossy
    Needs: a masked model
    Cost per step: one block; the logarithm of its size in steps
    """

    def __init__(
        self,
        *,
        base: int = 2,
        least: float = 0.0,
        block: int = 0,
        cache: str = "none",
        refresh: int = 0,
    ) -> None:
        super().__init__(block=block, cache=cache, refresh=refresh)
        if base < 2 or not 0 <= least < 1:
            raise ValueError("needs base >= 2 and 0 <= least < 1")
