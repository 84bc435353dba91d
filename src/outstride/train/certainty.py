"""`certainty`: a masked model is fine-tuned to be confident of many of its own tokens at once."""

from __future__ import annotations

import torch
from torch.nn import functional as fn

from outstride.train.corpus_files import TrainingRows
from outstride.train.full_finetune import FullFinetuneRecipe
from outstride.train.recipe import Measurement, recipe
from outstride.train.target import Target
from outstride.train.unmasking import (
    Canvases,
    FinishedCanvases,
    MaskedDecoding,
    agreement,
    at_least,
    most_confident,
    rows_by_key,
    write,
)

_TEXTS = 48
"""Held-out texts that are measured."""


@recipe("certainty")
class CertaintyRecipe(FullFinetuneRecipe):
    """Distills a masked model towards few passes: it learns its own finished texts from early
    canvases.

    The model first writes the answers, one token per pass. Canvases from before a random one of
    these passes are shown to it again, and it learns the final token of each mask. Where its argmax
    is that token already, the entropy of its distribution is minimized as well. This fine-tunes the
    model itself: other weights, other texts. Only the prompts and the answer lengths of the corpus
    are used.

    forcing: weight of the entropy loss. heat: temperature at which the entropy is measured; at lower
    ones, uncertain positions count more. early: share of canvases without any token of the answer.
    texts: number of texts that the model writes to learn from. threshold: confidence at which tokens
    are settled in the measurement.

    Paper: the loss of dParallel (Chen et al., 2025): self-distillation on the model's own trajectory
      and certainty forcing. Of D2F (Wang et al., 2025) only that the loss covers one block; neither its
      conversion to a block-causal model nor its pipelined blocks
    Makes: the model itself, for threshold and its like
    """

    def __init__(
        self,
        target: Target,
        *,
        forcing: float = 0.2,
        heat: float = 0.5,
        early: float = 0.3,
        texts: int = 8192,
        threshold: float = 0.9,
    ) -> None:
        if forcing < 0 or heat <= 0 or not 0 <= early <= 1:
            raise ValueError("needs forcing of 0 or more, heat above 0 and early from 0 to 1")
        if texts < 1 or not 0 < threshold <= 1:
            raise ValueError("needs texts of 1 or more and threshold above 0 and up to 1")
        self.decoding = MaskedDecoding.of(target)
        super().__init__(target)
        self.forcing, self.heat, self.early = forcing, heat, early
        self.texts, self.threshold = texts, threshold
        self._written: FinishedCanvases | None = None
        self._keys = self._limits = torch.empty(0, dtype=torch.long)
        self._plain: FinishedCanvases | None = None

    def prepare(self, rows: TrainingRows) -> None:
        """Writes the answers with the unchanged model."""
        rows = rows.take(slice(self.texts)).to(self.target.device)
        rows = rows.take(rows.keys.argsort())
        self._keys, self._limits = rows.keys, rows.stops
        self._written = write(self.teacher, self.decoding, rows, most_confident)

    def loss(self, rows: TrainingRows, numbers: torch.Generator) -> torch.Tensor:
        """Cross-entropy and entropy, at the masks of the current block."""
        canvas, final = self._canvases(rows, numbers)
        work = canvas.work()
        hidden = canvas.hidden_states(self.student, work)
        losses = self.student.map_logits(hidden, self._losses, final[work])
        counts = work.sum(1, keepdim=True).clamp(min=1).expand_as(work)[work]
        return (losses / counts).sum() / work.any(1).sum().clamp(min=1)

    def _canvases(
        self, rows: TrainingRows, numbers: torch.Generator
    ) -> tuple[Canvases, torch.Tensor]:
        """Canvases before random passes, and their final tokens."""
        written = self._written
        assert written is not None
        text = rows_by_key(rows.keys, self._keys)
        some = FinishedCanvases(written.tokens[text], written.times[text], written.passes[text])
        draws = torch.rand(2, len(text), generator=numbers, device=text.device)
        moments = (draws[0] * some.passes).long()
        moments = torch.where(draws[1] < self.early, 0, moments)
        return Canvases.at(self.decoding, some, self._limits[text], moments), some.tokens

    def _losses(self, logits: torch.Tensor, final: torch.Tensor) -> torch.Tensor:
        right = fn.cross_entropy(logits, final, reduction="none")
        shares = (logits / self.heat).log_softmax(-1)
        entropy = -(shares.exp() * shares).sum(-1)
        agreed = logits.argmax(-1) == final
        return right + self.forcing * entropy * agreed

    @torch.no_grad()
    def measure(self, held: TrainingRows) -> Measurement:
        """Tokens per pass with a threshold, and how many tokens equal those of the original's single
        steps.
        """
        rows = held.take(slice(_TEXTS)).to(self.target.device)
        if self._plain is None:
            self._plain = write(self.teacher, self.decoding, rows, most_confident)
        found = write(self.student, self.decoding, rows, at_least(self.threshold))
        return Measurement(found.tokens_per_pass, figures=agreement(found, self._plain))
