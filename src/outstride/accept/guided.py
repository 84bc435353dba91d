"""A small autoregressive model has a say in what is settled, from left to right."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from outstride.accept.unmask import Guess, Unmask, logits
from outstride.core.canvas import recall
from outstride.core.graph import FloatArray
from outstride.core.proposal import Proposal, Scores
from outstride.core.sampling import best
from outstride.core.sequence import View
from outstride.registry import acceptor


def log_softmax(row: FloatArray) -> FloatArray:
    x = row.astype(np.float64) - float(row.max())
    shifted: FloatArray = (x - np.log(np.exp(x).sum())).astype(np.float32)
    return shifted


@acceptor("guided")
class Guided(Unmask):
    """Settles tokens from the first gap on, for as long as the guide's view of them holds.

    The guide has read the guesses of the pass before. Its word on a position counts if everything to
    the left came out as it read it.
    """

    def __init__(self, *, weight: float, agree: bool) -> None:
        super().__init__()
        self.weight = weight
        self.agree = agree

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Guess]
    ) -> list[Guess]:
        read: dict[int, int] = recall(view).note or {}
        chosen: list[Guess] = []
        for place, guess in enumerate(found):
            if guess.position != view.end + place or guess.node not in proposal.drafted:
                break
            settled = self._decide(proposal, scores, guess)
            chosen.append(settled or guess)
            if settled is None or settled.token != read.get(settled.position):
                break
        return chosen or found[:1]

    def _decide(self, proposal: Proposal, scores: Scores, guess: Guess) -> Guess | None:
        """The token of both models together; None if the guide objects to it."""
        guide = proposal.drafted[guess.node]
        rules = proposal.rules.get(guess.node)

        def pick(row: FloatArray) -> int:
            ruled = row if rules is None else rules.apply(row)
            return int(best(ruled, proposal.draw, guess.position)[0])

        if self.agree:
            return guess if pick(guide) == guess.token else None
        row = self.weight * log_softmax(logits(scores, guess)) + (1.0 - self.weight) * guide
        return replace(guess, token=pick(row.astype(np.float32)))

    def note(
        self,
        view: View,
        proposal: Proposal,
        scores: Scores,
        found: list[Guess],
        settled: list[Guess],
    ) -> dict[int, int]:
        gone = {guess.position for guess in settled}
        return {guess.position: guess.token for guess in found if guess.position not in gone}
