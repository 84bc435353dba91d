"""Guesses that were right for several steps in a row earn credit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from outstride.accept.unmask import Guess, Unmask, logits, softmax
from outstride.core.canvas import recall
from outstride.core.graph import FloatArray
from outstride.core.proposal import Proposal, Scores
from outstride.core.sampling import best
from outstride.core.sequence import View
from outstride.registry import acceptor

Credits = dict[int, dict[int, float]]
"""By position and token."""


@acceptor("credit")
class Credit(Unmask):
    """Adds to each logit what its token has earned, then settles by a threshold."""

    def __init__(
        self,
        *,
        threshold: float,
        weight: float,
        decay: float,
        power: float,
        cache: str,
    ) -> None:
        super().__init__(cache=cache)
        self.threshold = threshold
        self.weight = weight
        self.decay = decay
        self.power = power

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Guess]
    ) -> list[Guess]:
        earned, chosen = self._earned(view, scores, found), []
        for guess in found:
            row = self._with_credit(logits(scores, guess), earned[guess.position])
            rules = proposal.rules.get(guess.node)
            ruled = row if rules is None else rules.apply(row)
            token = int(best(ruled, proposal.draw, guess.position)[0])
            logprob = float(np.log(softmax(row)[token]))
            chosen.append(replace(guess, token=token, logprob=logprob))
        sure = [guess for guess in chosen if guess.chance >= self.threshold]
        return sure or [max(chosen, key=lambda guess: (guess.logprob, -guess.position))]

    def _with_credit(self, row: FloatArray, earned: dict[int, float]) -> FloatArray:
        row = row.copy()
        for token, value in earned.items():
            row[token] += np.float32(self.weight * np.log1p(value))
        return row

    def _earned(self, view: View, scores: Scores, found: list[Guess]) -> Credits:
        """Old credit fades; the likeliest token of this step earns some."""
        old: Credits = recall(view).note or {}
        fresh: Credits = {}
        for guess in found:
            earned = {t: v * self.decay for t, v in old.get(guess.position, {}).items()}
            p = softmax(logits(scores, guess))
            top = int(np.argmax(p))
            earned[top] = earned.get(top, 0.0) + float(p[top]) ** self.power
            fresh[guess.position] = earned
        return fresh

    def note(
        self,
        view: View,
        proposal: Proposal,
        scores: Scores,
        found: list[Guess],
        settled: list[Guess],
    ) -> Credits:
        gone = {guess.position for guess in settled}
        return {p: c for p, c in self._earned(view, scores, found).items() if p not in gone}
