"""`certainty`: a masked model is taught to be sure of many of its own tokens at once."""

from __future__ import annotations

import torch
from torch.nn import functional as fn

from outstride.train.recipe import Measured, recipe
from outstride.train.target import Target
from outstride.train.unmasking import (
    Canvases,
    Manner,
    Written,
    above,
    agreement,
    numbers_of,
    surest,
    write,
)
from outstride.train.whole import Whole
from outstride.train.words import Rows

_TEXTS = 48
"""Held-out texts that are measured."""


@recipe("certainty")
class Certainty(Whole):
    """Distils a masked model towards few passes: it learns its own finished texts from early canvases.

    The model writes the answers once, one token per pass. Canvases as they stood before a random one
    of these passes are shown to it again, and it learns the token that each mask became; where it
    guesses that token already, it also learns to be certain of it. It is the model itself that
    changes: other weights, other texts. Of the words only the prompts and the lengths are used.

    forcing: the weight of certainty beside being right. heat: the temperature at which certainty is
    measured: the lower, the more the doubtful positions count. early: the share of canvases with
    nothing of the answer on them. texts: so many are written to learn from.
    threshold: the probability at which tokens are settled when it is measured.

    Paper: dParallel (Chen et al., 2025); distillation over blocks as in D2F (Wang et al., 2025)
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
        self.manner = Manner.of(target)
        super().__init__(target)
        self.forcing, self.heat, self.early = forcing, heat, early
        self.texts, self.threshold = texts, threshold
        self._written: Written | None = None
        self._keys = self._limits = torch.empty(0, dtype=torch.long)
        self._plain: Written | None = None

    def prepare(self, rows: Rows) -> None:
        """Writes the answers with the model as it is."""
        rows = rows.take(slice(self.texts)).to(self.target.device)
        rows = rows.take(rows.keys.argsort())
        self._keys, self._limits = rows.keys, rows.stops
        self._written = write(self.teacher, self.manner, rows, surest)

    def loss(self, rows: Rows, numbers: torch.Generator) -> torch.Tensor:
        """Being right and being certain, at the masks of the block in work."""
        canvas, final = self._canvases(rows, numbers)
        work = canvas.work()
        states = canvas.states(self.reader, work)
        losses = self.reader.over(states, self._losses, final[work])
        counts = work.sum(1, keepdim=True).clamp(min=1).expand_as(work)[work]
        return (losses / counts).sum() / work.any(1).sum().clamp(min=1)

    def _canvases(self, rows: Rows, numbers: torch.Generator) -> tuple[Canvases, torch.Tensor]:
        """Canvases of random moments, and what became of them."""
        written = self._written
        assert written is not None
        text = numbers_of(rows.keys, self._keys)
        some = Written(written.tokens[text], written.times[text], written.passes[text])
        draws = torch.rand(2, len(text), generator=numbers, device=text.device)
        moments = (draws[0] * some.passes).long()
        moments = torch.where(draws[1] < self.early, 0, moments)
        return Canvases.at(self.manner, some, self._limits[text], moments), some.tokens

    def _losses(self, logits: torch.Tensor, final: torch.Tensor) -> torch.Tensor:
        right = fn.cross_entropy(logits, final, reduction="none")
        shares = (logits / self.heat).log_softmax(-1)
        doubt = -(shares.exp() * shares).sum(-1)
        agreed = logits.argmax(-1) == final
        return right + self.forcing * doubt * agreed

    @torch.no_grad()
    def measure(self, held: Rows) -> Measured:
        """Tokens per pass with a threshold, and how many are those of the original's single steps."""
        rows = held.take(slice(_TEXTS)).to(self.target.device)
        if self._plain is None:
            self._plain = write(self.teacher, self.manner, rows, surest)
        found = write(self.reader, self.manner, rows, above(self.threshold))
        return Measured(found.tokens_per_pass, figures=agreement(found, self._plain))
