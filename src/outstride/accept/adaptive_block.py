"""Blocks that end where a thought does."""

from __future__ import annotations

from itertools import pairwise

from outstride.accept.unmask import Guess, Unmask
from outstride.core.canvas import recall
from outstride.core.proposal import Proposal, Scores
from outstride.core.sequence import View
from outstride.registry import acceptor


@acceptor("adaptive-block")
class AdaptiveBlock(Unmask):
    """Draws a border when a block begins, then settles by a threshold within it."""

    def __init__(
        self,
        *,
        threshold: float,
        delimiters: str,
        sure: float,
        shortest: int,
    ) -> None:
        super().__init__()
        self.threshold = threshold
        self.delimiters = {int(part) for part in delimiters.split("+") if part}
        self.sure = sure
        self.shortest = shortest

    def _border(self, view: View, found: list[Guess]) -> int:
        """Where the block in work ends."""
        known: int | None = recall(view).note
        if known is not None and known > view.end:
            return known
        ends = [g for g in found if g.token in self.delimiters and g.chance >= self.sure]
        if ends:
            return max(ends, key=lambda g: (g.chance, -g.position)).position + 1
        within = found[self.shortest - 1 :]
        falls = [(a.chance - b.chance, -a.position) for a, b in pairwise(within)]
        if self.delimiters or not falls:
            return found[-1].position + 1
        return -max(falls)[1] + 1

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Guess]
    ) -> list[Guess]:
        border = self._border(view, found)
        here = [guess for guess in found if guess.position < border] or found[:1]
        sure = [guess for guess in here if guess.chance >= self.threshold]
        return sure or [max(here, key=lambda guess: (guess.logprob, -guess.position))]

    def note(
        self,
        view: View,
        proposal: Proposal,
        scores: Scores,
        found: list[Guess],
        settled: list[Guess],
    ) -> int:
        return self._border(view, found)
