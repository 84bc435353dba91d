"""Drafted tokens that the target finds typical are good enough. Lossy."""

from __future__ import annotations

from outstride.core.proposal import Wants
from outstride.draft.draft import Draft
from outstride.registry import method


@method("typical", family="draft model", acceptor="typical")
class Typical(Draft):
    """A smaller model's tokens stay wherever the target finds them likely enough.

    It changes the text: where several tokens would do, the draft model's choice is taken and not the
    target's, so the distribution leans towards the draft model's. A token is likely enough above
    `epsilon`, or above `delta` * exp(-entropy) where the target itself is undecided. Greedy requests
    keep their text.

    Paper: typical acceptance of Medusa (Cai et al., 2024)
    Exactness: lossy
    Needs: draft model
    Cost per step: as for `draft`
    """

    wants = Wants(rows=True)

    def __init__(
        self,
        *,
        model: str,
        length: int = 4,
        width: int = 2,
        epsilon: float = 0.09,
        delta: float = 0.3,
    ) -> None:
        super().__init__(model=model, length=length, width=width)
        if not (0 < epsilon <= 1 and 0 < delta <= 1):
            raise ValueError("needs epsilon and delta above 0 and up to 1")
