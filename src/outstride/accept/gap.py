"""Everything at once, as soon as the answer is plain to see."""

from __future__ import annotations

from outstride.accept.unmask import Guess, Unmask, surest
from outstride.core.canvas import Sheet
from outstride.core.proposal import Proposal, Scores
from outstride.core.sequence import View
from outstride.registry import acceptor


@acceptor("gap")
class Gap(Unmask):
    """Settles all that is open once the mean lead of the best logit is wide, else the surest few."""

    def __init__(
        self,
        *,
        early: float,
        middle: float,
        late: float,
        count: int,
        block: int,
    ) -> None:
        super().__init__()
        self.bars = (early, middle, late)
        self.count = count
        self.block = block

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Guess]
    ) -> list[Guess]:
        sheet = Sheet(view)
        leads = []
        for guess in found:
            first, second = (value for _, value in scores.logprobs[guess.row][1:3])
            leads.append(first - second)
        progress = sheet.clock / max(view.limit - view.prompt_length, 1)
        if sum(leads) / len(leads) >= self.bars[min(int(3 * progress), 2)]:
            return found
        front = sheet.block(self.block)
        return surest(guess for guess in found if guess.position in front)[: self.count]
