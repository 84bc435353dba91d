"""A fixed number of guesses per step, in one of four orders."""

from __future__ import annotations

from outstride.accept.unmask import Guess, Unmask, ranked
from outstride.core.canvas import Sheet
from outstride.core.proposal import Proposal, Scores
from outstride.core.sequence import View
from outstride.registry import acceptor


@acceptor("steps")
class Steps(Unmask):
    """Settles the first `count` guesses of the order."""

    def __init__(self, *, count: int, order: str) -> None:
        super().__init__()
        self.count = count
        self.order = order

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Guess]
    ) -> list[Guess]:
        clock = Sheet(view).clock
        return ranked(found, scores, self.order, view, clock)[: self.count]
