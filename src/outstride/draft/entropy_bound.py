"""Tokens in parallel, as many as a bound on their joint error allows."""

from __future__ import annotations

from outstride.core.proposal import Wants
from outstride.draft.canvas import Canvas
from outstride.registry import method


@method("entropy-bound", family="diffusion", acceptor="entropy-bound")
class EntropyBound(Canvas):
    """Settles the positions of least entropy while what they could get wrong together is bounded.

    The bound is on the sum of their entropies less the largest, in nats: `bound`. A single position is
    always within it; positions that are certain cost nothing.

    Paper: EB-Sampler (Ben-Hamu et al., 2025)
    Exactness: lossy
    Needs: a masked model
    Cost per step: one block, whole rows of logits, for as many tokens as the bound allows
    """

    asks = Wants(logprobs=0, logits=True)

    def __init__(
        self, *, bound: float = 0.1, block: int = 0, cache: str = "none", refresh: int = 0
    ) -> None:
        super().__init__(block=block, cache=cache, refresh=refresh)
        if bound < 0:
            raise ValueError("needs bound >= 0")
