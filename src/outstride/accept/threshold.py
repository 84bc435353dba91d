"""Every guess that is sure enough."""

from __future__ import annotations

from outstride.accept.unmask import Guess, Unmask
from outstride.core.proposal import Proposal, Scores
from outstride.core.sequence import View
from outstride.registry import acceptor


@acceptor("threshold")
class Threshold(Unmask):
    """Settles all guesses whose probability reaches `threshold`."""

    def __init__(self, *, threshold: float, cache: str) -> None:
        super().__init__(cache=cache)
        self.threshold = threshold

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Guess]
    ) -> list[Guess]:
        return [guess for guess in found if guess.chance >= self.threshold]
