"""A token that the model keeps guessing is settled before it is sure."""

from __future__ import annotations

from outstride.core.proposal import Wants
from outstride.draft.canvas import Canvas
from outstride.registry import method


@method("credit", family="diffusion", acceptor="credit")
class Credit(Canvas):
    """Settles by a threshold on logits to which steady guesses have added their credit.

    At each step the likeliest token of an open position earns its probability to the `power`, and all
    credit fades by `decay`; a token's logit grows by `weight` times the logarithm of 1 + credit.

    Paper: CreditDecoding (Wang et al., 2025)
    Exactness: lossy
    Needs: a masked model
    Cost per step: one block, whole rows of logits
    """

    asks = Wants(logprobs=0, logits=True)

    def __init__(
        self,
        *,
        threshold: float = 0.9,
        weight: float = 1.0,
        decay: float = 0.7,
        power: float = 0.5,
        block: int = 0,
        cache: str = "none",
        refresh: int = 0,
    ) -> None:
        super().__init__(block=block, cache=cache, refresh=refresh)
        if not (0 < threshold <= 1 and weight >= 0 and 0 <= decay <= 1 and power > 0):
            raise ValueError("needs 0 < threshold <= 1, weight >= 0, 0 <= decay <= 1 and power > 0")
