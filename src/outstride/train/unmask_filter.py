"""`unmask-filter`: a small network that predicts which tokens of a masked model are final."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional as fn

from outstride.diffusion.filter import FEATURES, features
from outstride.train.corpus_files import TrainingRows
from outstride.train.full_finetune import DifferentiableModel
from outstride.train.recipe import Measurement, Recipe, recipe
from outstride.train.target import Target
from outstride.train.unmasking import (
    CanvasScores,
    FinishedCanvases,
    MaskedDecoding,
    agreement,
    most_confident,
    rows_by_key,
    write,
)

_TEXTS = 48
"""Held-out texts that are measured."""


@recipe("unmask-filter")
class UnmaskFilterRecipe(Recipe):
    """A per-position filter for masked models: is the most likely token of this mask the final one?

    The model first writes the answers, one token per pass. Training examples are the features of
    every mask in each pass, with whether its argmax was the token of the finished text. Only the
    prompts and the answer lengths of the corpus are used.

    units: hidden units of the network. sure: predicted probability that is enough to settle a token.
    texts: number of texts that the model writes to learn from. picks: examples per text and step.

    Paper: Learn2PD (Bao et al., 2025)
    Makes: filter
    """

    def __init__(
        self,
        target: Target,
        *,
        units: int = 32,
        sure: float = 0.9,
        texts: int = 2048,
        picks: int = 32,
    ) -> None:
        if min(units, texts, picks) < 1 or not 0 < sure < 1:
            raise ValueError("needs units, texts and picks of 1 or more, and sure between 0 and 1")
        self.target, self.units, self.sure = target, units, sure
        self.texts, self.picks = texts, picks
        self.decoding = MaskedDecoding.of(target)
        self.model = DifferentiableModel(target.config, target.weights, target.device)
        device = target.device
        self.weights = {
            "inner.weight": (FEATURES**-0.5 * torch.randn(units, FEATURES)).to(device),
            "inner.bias": torch.zeros(units, device=device),
            "outer.weight": (0.1 * units**-0.5 * torch.randn(1, units)).to(device),
            "outer.bias": torch.zeros(1, device=device),
        }
        self._shown = self._stays = self._firsts = self._counts = torch.empty(0)
        self._keys = torch.empty(0, dtype=torch.long)
        self._plain: FinishedCanvases | None = None

    def prepare(self, rows: TrainingRows) -> None:
        """Writes the answers, and notes what each pass shows of each mask."""
        rows = rows.take(slice(self.texts)).to(self.target.device)
        texts, places, tokens, shown = [], [], [], []

        def note(scores: CanvasScores) -> torch.Tensor:
            text, place = scores.work.nonzero(as_tuple=True)
            texts.append(scores.texts[text])
            places.append(place)
            tokens.append(scores.tokens[scores.work])
            shown.append(_features(scores)[scores.work])
            return most_confident(scores)

        written = write(self.model, self.decoding, rows, note)
        text = torch.cat(texts)
        order = text.argsort(stable=True)
        final = written.tokens[text, torch.cat(places)]
        self._stays = (torch.cat(tokens) == final)[order].float()
        self._shown = torch.cat(shown)[order]
        self._counts = torch.bincount(text, minlength=len(rows))
        self._firsts = self._counts.cumsum(0) - self._counts
        self._keys, order = rows.keys.sort()
        self._counts, self._firsts = self._counts[order], self._firsts[order]

    def loss(self, rows: TrainingRows, numbers: torch.Generator) -> torch.Tensor:
        """Binary cross-entropy over masks of random passes."""
        text = rows_by_key(rows.keys, self._keys)
        draws = torch.rand(len(text), self.picks, generator=numbers, device=text.device)
        picks = self._firsts[text][:, None] + (draws * self._counts[text][:, None]).long()
        picks = picks.clamp(max=len(self._stays) - 1)
        return fn.binary_cross_entropy_with_logits(
            self._scores(self._shown[picks]), self._stays[picks]
        )

    def _scores(self, shown: torch.Tensor) -> torch.Tensor:
        own = self.weights
        inner = fn.linear(shown, own["inner.weight"], own["inner.bias"]).relu()
        return fn.linear(inner, own["outer.weight"], own["outer.bias"])[..., 0].float()

    @torch.no_grad()
    def measure(self, held: TrainingRows) -> Measurement:
        """Tokens per pass with the filter, and how many tokens equal those of single steps."""
        rows = held.take(slice(_TEXTS)).to(self.target.device)
        if self._plain is None:
            self._plain = write(self.model, self.decoding, rows, most_confident)

        def choose(scores: CanvasScores) -> torch.Tensor:
            return scores.work & (self._scores(_features(scores)).sigmoid() >= self.sure)

        found = write(self.model, self.decoding, rows, choose)
        return Measurement(found.tokens_per_pass, figures=agreement(found, self._plain))

    def config(self) -> dict[str, Any]:
        return {"units": self.units, "features": FEATURES, "threshold": self.sure}


def _features(scores: CanvasScores) -> torch.Tensor:
    """The features that the method computes: [texts, positions, features]."""
    probability, margin, entropy = (
        torch.where(scores.work, table, 0.0).cpu().numpy().astype(np.float32)
        for table in (scores.probability, scores.margin, scores.entropy)
    )
    work, settled = scores.work.cpu().numpy(), scores.settled.cpu().numpy()
    sure = np.where(work, probability, settled.astype(np.float32))
    shown = torch.from_numpy(features(probability, margin, entropy, work, sure))
    return shown.to(scores.probability.device)
