"""A trained filter says which guesses will stay."""

from __future__ import annotations

from outstride.core.proposal import Wants
from outstride.draft.canvas import Canvas
from outstride.registry import method


@method("filter", family="trained", acceptor="filter")
class Filter(Canvas):
    """Settles every position of which a trained filter expects that its token stays, and always one.

    The filter is a tiny network over what a pass shows of each mask: the probability of its token, the
    lead over the next, the entropy, how sure its neighbours are and how much is still open. It was
    trained on the model's own texts, on whether each guess was that of the finished text. `from` names
    its folder; `threshold` is the probability of staying that is enough (0: the one it was made with).

    Paper: Learn2PD (Bao et al., 2025)
    Exactness: lossy
    Needs: a masked model, trained part
    Cost per step: one block, for as many tokens as are expected to stay; a few thousand products on
      the host
    """

    asks = Wants(logprobs=8)
    part = "unmask-filter"

    def __init__(
        self,
        *,
        from_: str,
        threshold: float = 0.0,
        block: int = 0,
        cache: str = "none",
        refresh: int = 0,
    ) -> None:
        super().__init__(block=block, cache=cache, refresh=refresh)
        if not 0 <= threshold < 1:
            raise ValueError("needs 0 <= threshold < 1")
        self.filter = from_
