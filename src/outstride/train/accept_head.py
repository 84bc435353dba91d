"""`accept-head` and `judge`: tiny networks on a model's last state, which foresee or make verdicts."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch.nn import functional as fn

from outstride.core.contracts import CAUSAL
from outstride.core.guess import EPS, SCALE
from outstride.train.recipe import Measured, Recipe, recipe
from outstride.train.target import Target
from outstride.train.walk import said, walk
from outstride.train.words import Rows

LONGEST, STOP = 8, 0.3
"""What drafts are measured with: tokens at most, and the chance of the whole below which they end."""
_TEXTS, _AT_ONCE = 64, 1024
"""Held-out texts that are measured, and positions whose logits exist at once."""


def area(scores: torch.Tensor, right: torch.Tensor) -> float:
    """How often what is right scores above what is not: one half for a guess, one for certainty."""
    order = scores.argsort()
    ranks = torch.empty_like(scores, dtype=torch.float64)
    ranks[order] = torch.arange(1, len(scores) + 1, dtype=torch.float64, device=scores.device)
    yes = int(right.sum())
    no = len(right) - yes
    if not yes or not no:
        return 0.5
    return float((ranks[right].sum() - yes * (yes + 1) / 2) / (yes * no))


class _OnStates(Recipe):
    """A bend between two small matrices, over the state that leaves the last layer, normalised.

    beside: how many more numbers it is shown.
    """

    beside: ClassVar[int] = 0

    def __init__(self, target: Target, *, inner: int) -> None:
        if inner < 1:
            raise ValueError("needs inner of 1 or more")
        if target.config.vision != CAUSAL:
            raise ValueError("judges models that continue their text, not those with masks")
        self.target, self.inner = target, inner
        width, device = target.config.hidden_size, target.device
        self.weights = {
            "inner.weight": (width**-0.5 * torch.randn(inner, width + self.beside)).to(device),
            "inner.bias": torch.zeros(inner, device=device),
            "outer.weight": torch.zeros(1, inner, device=device),
            "outer.bias": torch.zeros(1, device=device),
        }

    @abstractmethod
    def _lesson(
        self, rows: Rows, numbers: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What it is shown [rows, length, …], what is true of each, and where that counts."""

    def _chances(self, shown: torch.Tensor) -> torch.Tensor:
        """In logits."""
        inner = fn.relu(fn.linear(shown, self.weights["inner.weight"], self.weights["inner.bias"]))
        return fn.linear(inner, self.weights["outer.weight"], self.weights["outer.bias"])[..., 0]

    def loss(self, rows: Rows, numbers: torch.Generator) -> torch.Tensor:
        """Cross-entropy of yes and no."""
        shown, right, counted = self._lesson(rows, numbers)
        losses = fn.binary_cross_entropy_with_logits(
            self._chances(shown), right.float(), reduction="none"
        )
        return (losses * counted).sum() / counted.sum().clamp(min=1)

    def config(self) -> dict[str, Any]:
        return {"inner": self.inner, "beside": self.beside}

    def _held(self, held: Rows) -> Rows:
        greedy = held if bool(held.sampled.all()) else held.take(~held.sampled)
        return greedy.take(slice(_TEXTS)).to(self.target.device)


@recipe("accept-head")
class AcceptHead(_OnStates):
    """Foresees whether the next token of a draft model will hold, so that drafts end where they fail.

    It is trained for the draft model (`--model`) on words that the target wrote (`--data`), and reads
    the draft model's own last state and its confidence. inner: units of its middle.

    Paper: SpecDec++
    Makes: accept-head
    """

    beside = 1

    def __init__(self, target: Target, *, inner: int = 64) -> None:
        super().__init__(target, inner=inner)

    def _lesson(
        self, rows: Rows, numbers: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        del numbers
        shown, right, _ = self._drafts(rows)
        greedy = ~rows.sampled | rows.sampled.all()  # others only if there is nothing else
        return shown, right, _ahead(rows) & greedy[:, None]

    @torch.no_grad()
    def _drafts(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """At each position: what the head is shown, whether the token drafted behind it is the text's,
        and the draft model's own confidence in it."""
        last = self.target.config.layers
        states = self.target.states(rows.tokens, (last,))[last]
        found = [
            self.target.logits(some).softmax(-1).max(-1)
            for some in torch.split(states.flatten(0, 1), _AT_ONCE)
        ]
        chances, tokens = (
            torch.cat(part).view_as(rows.tokens) for part in zip(*found, strict=True)
        )
        odds = torch.logit(chances, eps=EPS) / SCALE
        shown = torch.cat([_even(states), odds[..., None]], dim=-1)
        return shown, tokens == rows.tokens.roll(-1, dims=1), chances

    @torch.no_grad()
    def measure(self, held: Rows) -> Measured:
        """Drafts along held-out texts: how far they get, and how much of them is thrown away."""
        rows = self._held(held)
        shown, right, sure = self._drafts(rows)
        counted, chances = _ahead(rows), self._chances(shown).sigmoid()
        lengths = _lengths(chances, rows.stops)
        runs = torch.minimum(_hits(right), lengths)
        visited = walk(runs.cpu(), rows.starts.cpu(), rows.stops.cpu()).to(runs.device)
        passes = int(visited.sum())
        drafted = float(lengths[visited].sum())
        return Measured(
            tokens_per_pass=float((rows.stops - rows.starts).sum()) / passes,
            figures={
                "area": area(chances[counted], right[counted]),
                "area_of_confidence": area(sure[counted], right[counted]),
                "drafted_per_pass": drafted / passes,
                "wasted": 1 - float(runs[visited].sum()) / max(drafted, 1.0),
            },
        )


@recipe("judge")
class Judge(_OnStates):
    """Tells tokens that the target itself could have written from others, by its state behind them.

    Its own words are right; wrong is one of the `ranks` likeliest other tokens, put in the place of
    one of them (a `share` of all). inner: units of its middle. What it passes changes the text.

    Paper: Judge Decoding, here without annotated answers
    Makes: judge
    """

    def __init__(
        self, target: Target, *, inner: int = 64, share: float = 0.15, ranks: int = 32
    ) -> None:
        super().__init__(target, inner=inner)
        if not 0 < share < 1 or not 2 <= ranks < target.config.vocab_size:
            raise ValueError(
                "needs share between 0 and 1, and ranks from 2 to the vocabulary's size"
            )
        self.share, self.ranks = share, ranks

    @torch.no_grad()
    def _lesson(
        self, rows: Rows, numbers: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens, last, device = rows.tokens, self.target.config.layers, rows.tokens.device
        counted = said(rows)
        chosen = torch.rand(tokens.shape, generator=numbers, device=device) < self.share
        chosen &= counted
        ranks = torch.randint(self.ranks, tokens.shape, generator=numbers, device=device)
        states = self.target.states(tokens, (last,))[last].roll(1, dims=1)
        wrong = tokens.clone()
        wrong[chosen] = self._other(states[chosen], ranks[chosen], tokens[chosen])
        return _even(self.target.states(wrong, (last,))[last]), wrong == tokens, counted

    def _other(
        self, states: torch.Tensor, ranks: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """The token of each rank that a state gives, or the one behind if that is the text's own."""
        likeliest = self.target.logits(states).topk(self.ranks + 1).indices
        found = likeliest.gather(1, ranks[:, None])[:, 0]
        return torch.where(found == tokens, likeliest.gather(1, ranks[:, None] + 1)[:, 0], found)

    @torch.no_grad()
    def measure(self, held: Rows) -> Measured:
        """How well it tells right from wrong. What that gives depends on who drafts."""
        rows = self._held(held)
        numbers = torch.Generator(self.target.device).manual_seed(0)
        shown, right, counted = self._lesson(rows, numbers)
        chances, right = self._chances(shown).sigmoid()[counted], right[counted]
        return Measured(
            tokens_per_pass=1.0,
            figures={
                "area": area(chances, right),
                "passed_right": float((chances[right] >= 0.9).float().mean()),
                "passed_wrong": float((chances[~right] >= 0.9).float().mean()),
            },
        )


def _even(states: torch.Tensor) -> torch.Tensor:
    """Divided by their root mean square, as `Filter.of_states` does."""
    return fn.rms_norm(states.float(), states.shape[-1:], eps=1e-6)


def _ahead(rows: Rows) -> torch.Tensor:
    """The positions behind which a token of an answer stands."""
    places = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)
    return (places >= rows.starts[:, None] - 1) & (places < rows.stops[:, None] - 1)


def _hits(right: torch.Tensor) -> torch.Tensor:
    """How many tokens behind each position are right without a gap, up to the longest draft."""
    padded, size = fn.pad(right, (0, LONGEST)), right.shape[1]
    steps = torch.stack([padded[:, i : i + size] for i in range(LONGEST)])
    return steps.long().cumprod(0).sum(0)


def _lengths(chances: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
    """How many tokens are drafted behind each position: until the chance of all falls below `STOP`.

    The token with which it falls is still drafted.
    """
    size = chances.shape[1]
    left = stops[:, None] - 1 - torch.arange(size, device=chances.device)
    padded = fn.pad(chances, (0, LONGEST))
    reached = torch.ones_like(chances)
    lengths = torch.zeros_like(chances, dtype=torch.long)
    for step in range(LONGEST):
        lengths += (reached >= STOP) & (left > step)
        reached = reached * padded[:, step : step + size]
    return lengths
