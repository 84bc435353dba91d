"""As many guesses as their own doubt allows."""

from __future__ import annotations

from outstride.accept.unmask import Guess, Unmask, surest
from outstride.core.proposal import Proposal, Scores
from outstride.core.sequence import View
from outstride.registry import acceptor


@acceptor("factor")
class Factor(Unmask):
    """Settles the n surest for the largest n with (n + 1) * (1 - chance of the n-th) < `factor`."""

    def __init__(self, *, factor: float, cache: str) -> None:
        super().__init__(cache=cache)
        self.factor = factor

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Guess]
    ) -> list[Guess]:
        order = surest(found)
        fits = [n for n, g in enumerate(order, start=1) if (n + 1) * (1 - g.chance) < self.factor]
        return order[: max(fits, default=0)]
