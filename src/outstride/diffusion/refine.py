"""`refine`: open positions enter a pass as mixtures of their likeliest tokens until these converge."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from outstride.core.graph import FloatArray, Mixture
from outstride.core.proposal import Proposal, Scores, Wants
from outstride.core.sequence import View
from outstride.core.softmax import entropy, softmax
from outstride.diffusion.canvas import recall, spec_of
from outstride.diffusion.unmasker import Prediction, Unmasker, logits_of
from outstride.registry import method


@dataclass(frozen=True, slots=True)
class Beliefs:
    """The distributions of open positions at the last pass."""

    inputs: dict[int, Mixture]
    """By position, the input of the next pass."""
    rows: dict[int, FloatArray]
    """By position, the probabilities."""
    passes: int
    """How many passes of this block settled nothing."""


@method("refine", family="diffusion")
class RefineUnmasker(Unmasker):
    """Lets beliefs settle before tokens: a mask is blended with the embeddings of its likeliest tokens.

    An open position enters a pass as a mixture of the mask and its `tokens` likeliest tokens, whose
    share is `blend` times its certainty. Up to `latent` passes only refine these beliefs, until their
    mean KL divergence between passes falls below `calm`; then positions are settled by `threshold`,
    and all the rest once the divergence is below `still`.

    Paper: Latent Refinement Decoding, LRD (Zhu et al., 2025)
    Exactness: lossy
    Needs: a masked model
    Cost per step: one block, whole rows of logits; some passes settle nothing
    """

    asks = Wants(logprobs=0, logits=True)

    def __init__(
        self,
        *,
        threshold: float = 0.9,
        blend: float = 0.5,
        tokens: int = 8,
        latent: int = 4,
        calm: float = 0.1,
        still: float = 0.001,
        block: int = 0,
    ) -> None:
        super().__init__(block=block)
        if not (0 < threshold <= 1 and 0 <= blend <= 1 and tokens >= 1 and latent >= 0):
            raise ValueError(
                "needs 0 < threshold <= 1, 0 <= blend <= 1, tokens >= 1 and latent >= 0"
            )
        if calm < 0 or still < 0:
            raise ValueError("needs calm >= 0 and still >= 0")
        self.threshold = threshold
        self.blend = blend
        self.tokens = tokens
        self.latent = latent
        self.calm = calm
        self.still = still

    def input(self, view: View, position: int, mask: int) -> int | Mixture:
        beliefs: Beliefs | None = recall(view).note
        if view.token_at(position) is None and beliefs is not None and position in beliefs.inputs:
            return beliefs.inputs[position]
        return super().input(view, position, mask)

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Prediction]
    ) -> list[Prediction] | None:
        divergence, old = self._divergence(view, scores, found), self._previous(view, found)
        if old.passes < self.latent and divergence > self.calm:
            return None
        if divergence <= self.still:
            return found
        return [p for p in found if p.probability >= self.threshold]

    def _previous(self, view: View, found: list[Prediction]) -> Beliefs:
        """The beliefs of the last pass over this block; empty if the block is new."""
        old: Beliefs | None = recall(view).note
        if old is None or not any(p.position in old.rows for p in found):
            return Beliefs({}, {}, 0)
        return old

    def _divergence(self, view: View, scores: Scores, found: list[Prediction]) -> float:
        """The mean KL divergence from the beliefs of the pass before, in nats."""
        old, total = self._previous(view, found), 0.0
        for prediction in found:
            if prediction.position not in old.rows:
                return math.inf
            p, q = softmax(logits_of(scores, prediction)), old.rows[prediction.position]
            total += float((p * np.log(np.maximum(p, 1e-12) / np.maximum(q, 1e-12))).sum())
        return total / len(found)

    def note(
        self,
        view: View,
        proposal: Proposal,
        scores: Scores,
        found: list[Prediction],
        settled: list[Prediction],
    ) -> Beliefs:
        masked, done = spec_of(view), {p.position for p in settled}
        inputs, rows = {}, {}
        for prediction in found:
            if prediction.position in done or masked is None:
                continue
            rows[prediction.position] = p = softmax(logits_of(scores, prediction))
            uncertainty = entropy(p) / math.log(len(p))
            share = self.blend * max(0.0, 1.0 - uncertainty)
            top = np.argsort(-p, kind="stable")[: self.tokens]
            weights = share * p[top] / p[top].sum()
            inputs[prediction.position] = Mixture(
                (masked.token, *map(int, top)), (1.0 - share, *map(float, weights))
            )
        passes = self._previous(view, found).passes + (not settled)
        return Beliefs(inputs, rows, passes)
