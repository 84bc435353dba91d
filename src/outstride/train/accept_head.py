"""`accept-head` and `judge`: small classifiers on a model's last hidden state."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch.nn import functional as fn

from outstride.core.contracts import CAUSAL
from outstride.core.draft_tree import EPS, SCALE
from outstride.train.acceptance_length import answer_mask, visited_positions
from outstride.train.corpus_files import TrainingRows
from outstride.train.recipe import Measurement, Recipe, recipe
from outstride.train.target import Target

LONGEST, STOP = 8, 0.3
"""Drafts of the measurement: at most this many tokens, ended when the draft's acceptance rate falls
below `STOP`.
"""
_TEXTS, _AT_ONCE = 64, 1024
"""Held-out texts that are measured, and positions whose logits exist at once."""


def ranking_area(scores: torch.Tensor, positive: torch.Tensor) -> float:
    """Area under the ROC curve: how often a positive scores above a negative. 0.5 for a random
    score.
    """
    order = scores.argsort()
    ranks = torch.empty_like(scores, dtype=torch.float64)
    ranks[order] = torch.arange(1, len(scores) + 1, dtype=torch.float64, device=scores.device)
    yes = int(positive.sum())
    no = len(positive) - yes
    if not yes or not no:
        return 0.5
    return float((ranks[positive].sum() - yes * (yes + 1) / 2) / (yes * no))


class _HiddenStateClassifier(Recipe):
    """A two-layer MLP (ReLU) on the normalized output of the last layer.

    extra_inputs: number of further inputs next to the hidden state.
    """

    extra_inputs: ClassVar[int] = 0

    def __init__(self, target: Target, *, inner: int) -> None:
        if inner < 1:
            raise ValueError("needs inner of 1 or more")
        if target.config.attention_pattern != CAUSAL:
            raise ValueError("is for autoregressive models, not for masked ones")
        self.target, self.inner = target, inner
        width, device = target.config.hidden_size, target.device
        self.weights = {
            "inner.weight": (width**-0.5 * torch.randn(inner, width + self.extra_inputs)).to(
                device
            ),
            "inner.bias": torch.zeros(inner, device=device),
            "outer.weight": torch.zeros(1, inner, device=device),
            "outer.bias": torch.zeros(1, device=device),
        }

    @abstractmethod
    def _examples(
        self, rows: TrainingRows, numbers: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Inputs [rows, length, …], labels [rows, length], and which positions count [rows, length]."""

    def _logits(self, shown: torch.Tensor) -> torch.Tensor:
        """Logits of the positive class: [rows, length]."""
        inner = fn.relu(fn.linear(shown, self.weights["inner.weight"], self.weights["inner.bias"]))
        return fn.linear(inner, self.weights["outer.weight"], self.weights["outer.bias"])[..., 0]

    def loss(self, rows: TrainingRows, numbers: torch.Generator) -> torch.Tensor:
        """Binary cross-entropy."""
        shown, right, counted = self._examples(rows, numbers)
        losses = fn.binary_cross_entropy_with_logits(
            self._logits(shown), right.float(), reduction="none"
        )
        return (losses * counted).sum() / counted.sum().clamp(min=1)

    def config(self) -> dict[str, Any]:
        return {"inner": self.inner, "beside": self.extra_inputs}

    def _held_out(self, held: TrainingRows) -> TrainingRows:
        greedy = held if bool(held.sampled.all()) else held.take(~held.sampled)
        return greedy.take(slice(_TEXTS)).to(self.target.device)


@recipe("accept-head")
class AcceptHeadRecipe(_HiddenStateClassifier):
    """Predicts whether the next token of a draft model will be accepted, so that drafts end before
    they fail.

    It is trained for the draft model (`--model`) on a corpus that the target wrote (`--data`). Its
    inputs are the draft model's last hidden state and its confidence. inner: hidden units.

    Paper: SpecDec++
    Makes: accept-head
    """

    extra_inputs = 1

    def __init__(self, target: Target, *, inner: int = 64) -> None:
        super().__init__(target, inner=inner)

    def _examples(
        self, rows: TrainingRows, numbers: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        del numbers
        shown, right, _ = self._drafts(rows)
        greedy = ~rows.sampled | rows.sampled.all()  # others only if there is nothing else
        return shown, right, _predicts_answer(rows) & greedy[:, None]

    @torch.no_grad()
    def _drafts(self, rows: TrainingRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """At each position: inputs, whether the drafted next token is the text's, and the draft
        model's confidence in it.
        """
        last = self.target.config.layers
        hidden = self.target.hidden_states(rows.tokens, (last,))[last]
        found = [
            self.target.logits(some).softmax(-1).max(-1)
            for some in torch.split(hidden.flatten(0, 1), _AT_ONCE)
        ]
        rates, tokens = (
            torch.cat(tensor).view_as(rows.tokens) for tensor in zip(*found, strict=True)
        )
        confidence = torch.logit(rates, eps=EPS) / SCALE
        shown = torch.cat([_normalized(hidden), confidence[..., None]], dim=-1)
        return shown, tokens == rows.tokens.roll(-1, dims=1), rates

    @torch.no_grad()
    def measure(self, held: TrainingRows) -> Measurement:
        """Drafts along held-out texts: how far drafts get, and what share of them is rejected."""
        rows = self._held_out(held)
        shown, right, sure = self._drafts(rows)
        counted, rates = _predicts_answer(rows), self._logits(shown).sigmoid()
        lengths = _lengths(rates, rows.stops)
        runs = torch.minimum(_num_correct(right), lengths)
        visited = visited_positions(runs.cpu(), rows.starts.cpu(), rows.stops.cpu()).to(runs.device)
        passes = int(visited.sum())
        drafted = float(lengths[visited].sum())
        return Measurement(
            tokens_per_pass=float((rows.stops - rows.starts).sum()) / passes,
            figures={
                "area": ranking_area(rates[counted], right[counted]),
                "area_of_confidence": ranking_area(sure[counted], right[counted]),
                "drafted_per_pass": drafted / passes,
                "wasted": 1 - float(runs[visited].sum()) / max(drafted, 1.0),
            },
        )


@recipe("judge")
class JudgeRecipe(_HiddenStateClassifier):
    """Tells tokens that the target could have written from others, by its hidden state after them.

    Positive examples are the target's own tokens. A negative is one of the `ranks` most likely other
    tokens in the place of one of them (a `share` of all). inner: hidden units. Accepting by this
    classifier changes the text.

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
    def _examples(
        self, rows: TrainingRows, numbers: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens, last, device = rows.tokens, self.target.config.layers, rows.tokens.device
        counted = answer_mask(rows)
        chosen = torch.rand(tokens.shape, generator=numbers, device=device) < self.share
        chosen &= counted
        ranks = torch.randint(self.ranks, tokens.shape, generator=numbers, device=device)
        hidden = self.target.hidden_states(tokens, (last,))[last].roll(1, dims=1)
        wrong = tokens.clone()
        wrong[chosen] = self._other(hidden[chosen], ranks[chosen], tokens[chosen])
        return (
            _normalized(self.target.hidden_states(wrong, (last,))[last]),
            wrong == tokens,
            counted,
        )

    def _other(
        self, hidden: torch.Tensor, ranks: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """The candidate of each rank, or the next one if that is the text's own token."""
        candidates = self.target.logits(hidden).topk(self.ranks + 1).indices
        found = candidates.gather(1, ranks[:, None])[:, 0]
        return torch.where(found == tokens, candidates.gather(1, ranks[:, None] + 1)[:, 0], found)

    @torch.no_grad()
    def measure(self, held: TrainingRows) -> Measurement:
        """How well it separates positives from negatives. The gain depends on the draft model."""
        rows = self._held_out(held)
        numbers = torch.Generator(self.target.device).manual_seed(0)
        shown, right, counted = self._examples(rows, numbers)
        rates, right = self._logits(shown).sigmoid()[counted], right[counted]
        return Measurement(
            tokens_per_pass=1.0,
            figures={
                "area": ranking_area(rates, right),
                "passed_right": float((rates[right] >= 0.9).float().mean()),
                "passed_wrong": float((rates[~right] >= 0.9).float().mean()),
            },
        )


def _normalized(hidden: torch.Tensor) -> torch.Tensor:
    """Divided by their root mean square, as `TrainedFilter.of_hidden_states` does."""
    return fn.rms_norm(hidden.float(), hidden.shape[-1:], eps=1e-6)


def _predicts_answer(rows: TrainingRows) -> torch.Tensor:
    """Positions that predict a token of an answer: [rows, length]."""
    places = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)
    return (places >= rows.starts[:, None] - 1) & (places < rows.stops[:, None] - 1)


def _num_correct(right: torch.Tensor) -> torch.Tensor:
    """Number of consecutive correct tokens after each position, up to the longest draft: [rows,
    length].
    """
    padded, size = fn.pad(right, (0, LONGEST)), right.shape[1]
    steps = torch.stack([padded[:, i : i + size] for i in range(LONGEST)])
    return steps.long().cumprod(0).sum(0)


def _lengths(rates: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
    """Length of the draft at each position: until the acceptance rate of the whole draft falls below
    `STOP`.

    The token with which it falls is still drafted.
    """
    size = rates.shape[1]
    left = stops[:, None] - 1 - torch.arange(size, device=rates.device)
    padded = fn.pad(rates, (0, LONGEST))
    reached = torch.ones_like(rates)
    lengths = torch.zeros_like(rates, dtype=torch.long)
    for step in range(LONGEST):
        lengths += (reached >= STOP) & (left > step)
        reached = reached * padded[:, step : step + size]
    return lengths
