"""Sure guesses, and what stands near them."""

from __future__ import annotations

from outstride.accept.unmask import Guess, Unmask
from outstride.core.proposal import Proposal, Scores
from outstride.core.sequence import View
from outstride.registry import acceptor


@acceptor("leap")
class Leap(Unmask):
    """Settles anchors, and their neighbours by a lower bar."""

    def __init__(
        self,
        *,
        anchor: float,
        relaxed: float,
        radius: int,
        cache: str,
    ) -> None:
        super().__init__(cache=cache)
        self.anchor = anchor
        self.relaxed = relaxed
        self.radius = radius

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Guess]
    ) -> list[Guess]:
        anchors = [guess.position for guess in found if guess.chance >= self.anchor]

        def near(guess: Guess) -> bool:
            return any(abs(guess.position - place) <= self.radius for place in anchors)

        return [g for g in found if g.position in anchors or (g.chance >= self.relaxed and near(g))]
