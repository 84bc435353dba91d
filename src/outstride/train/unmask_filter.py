"""`unmask-filter`: a tiny network that tells which guesses of a masked model will stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional as fn

from outstride.accept.filter import FEATURES, features
from outstride.train.recipe import Measured, Recipe, recipe
from outstride.train.target import Target
from outstride.train.unmasking import Look, Manner, Written, agreement, numbers_of, surest, write
from outstride.train.whole import Reader
from outstride.train.words import Rows

_TEXTS = 48
"""Held-out texts that are measured."""


@recipe("unmask-filter")
class UnmaskFilter(Recipe):
    """A per-position filter for masked models: will the token that is guessed here stay?

    The model writes the answers once, one token per pass. What each pass shows of every mask is
    learned from, with whether its guess was the token of the finished text. Of the words only the
    prompts and the lengths of the answers are used.

    units: of the network. sure: the probability of staying that is enough to settle a token.
    texts: so many are written to learn from. picks: guesses per text and step.

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
        self.manner = Manner.of(target)
        self.reader = Reader(target.config, target.weights, target.device)
        device = target.device
        self.weights = {
            "inner.weight": (FEATURES**-0.5 * torch.randn(units, FEATURES)).to(device),
            "inner.bias": torch.zeros(units, device=device),
            "outer.weight": (0.1 * units**-0.5 * torch.randn(1, units)).to(device),
            "outer.bias": torch.zeros(1, device=device),
        }
        self._shown = self._stays = self._firsts = self._counts = torch.empty(0)
        self._keys = torch.empty(0, dtype=torch.long)
        self._plain: Written | None = None

    def prepare(self, rows: Rows) -> None:
        """Writes the answers, and notes what each pass shows of each mask."""
        rows = rows.take(slice(self.texts)).to(self.target.device)
        texts, places, tokens, shown = [], [], [], []

        def note(look: Look) -> torch.Tensor:
            text, place = look.work.nonzero(as_tuple=True)
            texts.append(look.texts[text])
            places.append(place)
            tokens.append(look.tokens[look.work])
            shown.append(_features(look)[look.work])
            return surest(look)

        written = write(self.reader, self.manner, rows, note)
        text = torch.cat(texts)
        order = text.argsort(stable=True)
        final = written.tokens[text, torch.cat(places)]
        self._stays = (torch.cat(tokens) == final)[order].float()
        self._shown = torch.cat(shown)[order]
        self._counts = torch.bincount(text, minlength=len(rows))
        self._firsts = self._counts.cumsum(0) - self._counts
        self._keys, order = rows.keys.sort()
        self._counts, self._firsts = self._counts[order], self._firsts[order]

    def loss(self, rows: Rows, numbers: torch.Generator) -> torch.Tensor:
        """Cross-entropy of staying, over guesses of random passes."""
        text = numbers_of(rows.keys, self._keys)
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
    def measure(self, held: Rows) -> Measured:
        """How many tokens a pass settles with the filter, and how many are those of single steps."""
        rows = held.take(slice(_TEXTS)).to(self.target.device)
        if self._plain is None:
            self._plain = write(self.reader, self.manner, rows, surest)

        def choose(look: Look) -> torch.Tensor:
            return look.work & (self._scores(_features(look)).sigmoid() >= self.sure)

        found = write(self.reader, self.manner, rows, choose)
        return Measured(found.tokens_per_pass, figures=agreement(found, self._plain))

    def config(self) -> dict[str, Any]:
        return {"units": self.units, "features": FEATURES, "threshold": self.sure}


def _features(look: Look) -> torch.Tensor:
    """The same numbers as the method sees: [texts, positions, features]."""
    chance, gap, doubt = (
        torch.where(look.work, table, 0.0).cpu().numpy().astype(np.float32)
        for table in (look.chance, look.gap, look.doubt)
    )
    work, settled = look.work.cpu().numpy(), look.settled.cpu().numpy()
    sure = np.where(work, chance, settled.astype(np.float32))
    shown = torch.from_numpy(features(chance, gap, doubt, work, sure))
    return shown.to(look.chance.device)
