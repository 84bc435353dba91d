"""Positions far from each other, on a schedule that halves the distance."""

from __future__ import annotations

import math

from outstride.accept.unmask import Guess, Unmask
from outstride.core.canvas import Sheet
from outstride.core.proposal import Proposal, Scores
from outstride.core.sequence import View
from outstride.registry import acceptor


@acceptor("dilated")
class Dilated(Unmask):
    """Settles the open positions of the widest stride that still has some."""

    def __init__(self, *, base: int, least: float, block: int, cache: str) -> None:
        super().__init__(cache=cache)
        self.base = base
        self.least = least
        self.block = block

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Guess]
    ) -> list[Guess]:
        size = max(len(Sheet(view).block(self.block)), 2)
        rounds = math.ceil(math.log(size, self.base))
        for stride in (-(-size // self.base ** (i + 1)) for i in range(rounds)):
            due = [g for g in found if (g.position - view.prompt_length) % stride == 0]
            if sure := [g for g in due if g.chance >= self.least]:
                return sure
        return []
