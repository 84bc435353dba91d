"""The surer the tokens, the more of them per pass."""

from __future__ import annotations

from outstride.draft.canvas import Canvas
from outstride.registry import method


@method("factor", family="diffusion", acceptor="factor")
class Factor(Canvas):
    """Settles the n surest positions for the largest n with (n + 1) * (1 - c) < `factor`.

    c is the probability of the least sure of them: the more tokens are settled together, the surer
    each has to be. A larger factor settles more.

    Paper: Fast-dLLM (Wu et al., 2025), its factor-based rule
    Exactness: lossy
    Needs: a masked model
    Cost per step: one block, for as many tokens as the rule allows
    """

    def __init__(
        self, *, factor: float = 1.0, block: int = 0, cache: str = "none", refresh: int = 0
    ) -> None:
        super().__init__(block=block, cache=cache, refresh=refresh)
        if factor <= 0:
            raise ValueError("needs factor > 0")
