"""Several blocks at once, the later ones by a stricter rule."""

from __future__ import annotations

from outstride.accept.unmask import Guess, Unmask, surest
from outstride.core.canvas import Sheet
from outstride.core.proposal import Proposal, Scores
from outstride.core.sequence import View
from outstride.registry import acceptor


@acceptor("pipeline")
class Pipeline(Unmask):
    """Settles what is sure in every block in work, and one guess at least in those that are due.

    The first block is always due; a later one is once nearly all of the one before it is settled.
    """

    def __init__(
        self,
        *,
        threshold: float,
        depth: int,
        start: float,
        due: float,
        penalty: float,
        block: int,
    ) -> None:
        super().__init__()
        self.threshold = threshold
        self.depth = depth
        self.start = start
        self.due = due
        self.penalty = penalty
        self.block = block

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Guess]
    ) -> list[Guess]:
        sheet, chosen, done = Sheet(view), list[Guess](), 1.0
        for block in sheet.blocks(self.block, self.depth, self.start):
            here = [guess for guess in found if guess.position in block]
            bar = {
                g.position: self.threshold + self.penalty * (g.position - sheet.end) for g in here
            }
            sure = [guess for guess in here if guess.chance >= bar[guess.position]]
            chosen += sure or (surest(here)[:1] if done >= self.due else [])
            answer = [p for p in block if p >= view.prompt_length]
            done = 1.0 - len(sheet.open(answer)) / max(len(answer), 1)
        return chosen
