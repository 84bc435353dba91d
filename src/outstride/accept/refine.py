"""Belief before decision: open positions pass on what they think of, until they come to rest."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from outstride.accept.unmask import Guess, Unmask, logits, softmax
from outstride.core.canvas import recall
from outstride.core.graph import FloatArray, Mixture
from outstride.core.proposal import Proposal, Scores
from outstride.core.sequence import View
from outstride.registry import acceptor


@dataclass(frozen=True, slots=True)
class Belief:
    """What open positions thought at the last pass."""

    inputs: dict[int, Mixture]
    rows: dict[int, FloatArray]
    passes: int
    """How many passes were spent on thinking alone."""


@acceptor("refine")
class Refine(Unmask):
    """Settles nothing while beliefs still move, then what is sure, and the rest once all is still."""

    def __init__(
        self,
        *,
        threshold: float,
        blend: float,
        tokens: int,
        latent: int,
        calm: float,
        still: float,
    ) -> None:
        super().__init__()
        self.threshold = threshold
        self.blend = blend
        self.tokens = tokens
        self.latent = latent
        self.calm = calm
        self.still = still

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Guess]
    ) -> list[Guess] | None:
        moved, old = self._movement(view, scores, found), self._old(view, found)
        if old.passes < self.latent and moved > self.calm:
            return None
        if moved <= self.still:
            return found
        return [guess for guess in found if guess.chance >= self.threshold]

    def _old(self, view: View, found: list[Guess]) -> Belief:
        """What was thought before; nothing if this is a new block."""
        old: Belief | None = recall(view).note
        if old is None or not any(guess.position in old.rows for guess in found):
            return Belief({}, {}, 0)
        return old

    def _movement(self, view: View, scores: Scores, found: list[Guess]) -> float:
        """The mean divergence of beliefs from those of the pass before, in nats."""
        old, total = self._old(view, found), 0.0
        for guess in found:
            if guess.position not in old.rows:
                return math.inf
            p, q = softmax(logits(scores, guess)), old.rows[guess.position]
            total += float((p * np.log(np.maximum(p, 1e-12) / np.maximum(q, 1e-12))).sum())
        return total / len(found)

    def note(
        self,
        view: View,
        proposal: Proposal,
        scores: Scores,
        found: list[Guess],
        settled: list[Guess],
    ) -> Belief:
        masking, gone = view.masking(), {guess.position for guess in settled}
        inputs, rows = {}, {}
        for guess in found:
            if guess.position in gone or masking is None:
                continue
            rows[guess.position] = p = softmax(logits(scores, guess))
            doubt = float(-(p * np.log(np.maximum(p, 1e-30))).sum()) / math.log(len(p))
            share = self.blend * max(0.0, 1.0 - doubt)
            top = np.argsort(-p, kind="stable")[: self.tokens]
            weights = share * p[top] / p[top].sum()
            inputs[guess.position] = Mixture(
                (masking.token, *map(int, top)), (1.0 - share, *map(float, weights))
            )
        thinking = self._old(view, found).passes + (not settled)
        return Belief(inputs, rows, thinking)
