"""`credit`: tokens that are predicted at several steps in a row gain logit mass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from outstride.core.graph import FloatArray
from outstride.core.proposal import Proposal, Scores, Wants
from outstride.core.sampling import best
from outstride.core.sequence import View
from outstride.core.softmax import softmax
from outstride.diffusion.canvas import recall
from outstride.diffusion.unmasker import Prediction, Unmasker, logits_of
from outstride.registry import method

Credits = dict[int, dict[int, float]]
"""Credit by position and token."""


@method("credit", family="diffusion")
class CreditUnmasker(Unmasker):
    """Settles by a threshold on logits to which steady guesses have added their credit.

    At each step the likeliest token of an open position earns its probability to the `power`, and all
    credit fades by `decay`; a token's logit grows by `weight` times the logarithm of 1 + credit.

    Paper: CreditDecoding (Wang et al., 2025)
    Exactness: lossy
    Needs: a masked model
    Cost per step: one block, whole rows of logits
    """

    asks = Wants(logprobs=0, logits=True)

    def __init__(
        self,
        *,
        threshold: float = 0.9,
        weight: float = 1.0,
        decay: float = 0.7,
        power: float = 0.5,
        block: int = 0,
        cache: str = "none",
        refresh: int = 0,
    ) -> None:
        super().__init__(block=block, cache=cache, refresh=refresh)
        if not (0 < threshold <= 1 and weight >= 0 and 0 <= decay <= 1 and power > 0):
            raise ValueError("needs 0 < threshold <= 1, weight >= 0, 0 <= decay <= 1 and power > 0")
        self.threshold = threshold
        self.weight = weight
        self.decay = decay
        self.power = power

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Prediction]
    ) -> list[Prediction]:
        earned, chosen = self._credits(view, scores, found), []
        for prediction in found:
            row = self._with_credit(logits_of(scores, prediction), earned[prediction.position])
            processors = proposal.processors.get(prediction.node)
            processed = row if processors is None else processors.apply(row)
            token = int(best(processed, proposal.sampling, prediction.position)[0])
            logprob = float(np.log(softmax(row)[token]))
            chosen.append(replace(prediction, token=token, logprob=logprob))
        sure = [prediction for prediction in chosen if prediction.probability >= self.threshold]
        return sure or [max(chosen, key=lambda p: (p.logprob, -p.position))]

    def _with_credit(self, row: FloatArray, earned: dict[int, float]) -> FloatArray:
        row = row.copy()
        for token, value in earned.items():
            row[token] += np.float32(self.weight * np.log1p(value))
        return row

    def _credits(self, view: View, scores: Scores, found: list[Prediction]) -> Credits:
        """Credit after this step: old credit decays, and the likeliest tokens earn some."""
        old: Credits = recall(view).note or {}
        fresh: Credits = {}
        for prediction in found:
            earned = {t: v * self.decay for t, v in old.get(prediction.position, {}).items()}
            p = softmax(logits_of(scores, prediction))
            top = int(np.argmax(p))
            earned[top] = earned.get(top, 0.0) + float(p[top]) ** self.power
            fresh[prediction.position] = earned
        return fresh

    def note(
        self,
        view: View,
        proposal: Proposal,
        scores: Scores,
        found: list[Prediction],
        settled: list[Prediction],
    ) -> Credits:
        done = {prediction.position for prediction in settled}
        return {p: c for p, c in self._credits(view, scores, found).items() if p not in done}
