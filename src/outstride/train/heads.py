"""`heads`: small heads on the target's last hidden state, each of which drafts one token further
ahead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as fn

from outstride.core.contracts import CAUSAL
from outstride.train.acceptance_length import answer_mask, measure_chains, sample_anchors
from outstride.train.corpus_files import TrainingRows
from outstride.train.draft_vocabulary import draft_scores, frequent_tokens
from outstride.train.layers import Weights, norm
from outstride.train.recipe import Measurement, Recipe, recipe
from outstride.train.target import Target


def head_hidden(
    weights: Weights, count: int, eps: float, hidden: torch.Tensor, tokens: torch.Tensor | None
) -> torch.Tensor:
    """Normalized hidden states of all heads: [..., heads, width].

    hidden: of the positions that chose the last token, [..., width]. tokens: for chained heads, the
    embeddings of that token and of those after it, [..., heads, width]; None: independent heads.
    """
    found, x = [], hidden
    for i in range(count):
        at = f"heads.{i}."
        start = hidden if tokens is None else x
        y = norm(start, weights[f"{at}norm.weight"], eps)
        if tokens is not None:
            y = torch.cat([y, norm(tokens[..., i, :], weights["token.weight"], eps)], dim=-1)
        inner = fn.silu(fn.linear(y, weights[f"{at}enter.weight"]))
        x = start + fn.linear(inner, weights[f"{at}leave.weight"])
        found.append(norm(x, weights[f"{at}last.weight"], eps))
    return torch.stack(found, dim=-2)


@recipe("heads")
class HeadsRecipe(Recipe):
    """Small heads on the target's last hidden state: the first drafts the second next token, and so
    on.

    Chained heads start from the hidden state of the head before and the embedding of the token
    drafted there. Independent heads use the target's hidden state alone; a low-rank correction by
    the previous token makes their draft tokens follow each other.

    heads: how many. chained: whether heads build on each other. inner: width of a head's MLP; 0:
    twice that of the target's hidden states. cover: share of the answers' tokens that the draft
    vocabulary covers. rank: of the correction. anchors: positions per text and step. decay: weight
    of a head relative to the one before it.

    Paper: Medusa, Blockwise Parallel Decoding with draft refinement; chained as in Hydra, Clover and
      S4C
    Makes: heads
    """

    def __init__(
        self,
        target: Target,
        *,
        heads: int = 4,
        chained: bool = True,
        inner: int = 0,
        cover: float = 0.985,
        rank: int = 32,
        anchors: int = 64,
        decay: float = 0.8,
    ) -> None:
        if min(heads, rank, anchors) < 1 or inner < 0:
            raise ValueError("needs heads, rank and anchors of 1 or more, and inner of 0 or more")
        if not (0 < cover <= 1 and 0 < decay <= 1):
            raise ValueError("needs cover and decay above 0 and up to 1")
        if target.config.attention_pattern != CAUSAL:
            raise ValueError("drafts for autoregressive models, not for masked ones")
        self.target, self.heads, self.chained = target, heads, chained
        self.inner = inner or 2 * target.config.hidden_size
        self.cover, self.rank, self.anchors, self.decay = cover, rank, anchors, decay
        self.vocabulary = self._index = torch.empty(0, dtype=torch.long)
        self._head = torch.empty(0)
        width, device = target.config.hidden_size, target.device
        wide = (1 + chained) * width
        self.weights = {"token.weight": torch.ones(width, device=device)} if chained else {}
        for i in range(heads):
            at = f"heads.{i}."
            enter = wide**-0.5 * torch.randn(self.inner, wide)
            self.weights[f"{at}norm.weight"] = torch.ones(width, device=device)
            self.weights[f"{at}enter.weight"] = enter.to(device)
            self.weights[f"{at}leave.weight"] = torch.zeros(width, self.inner, device=device)
            self.weights[f"{at}last.weight"] = target.weights["model.norm.weight"].clone()

    def prepare(self, rows: TrainingRows) -> None:
        """Chooses the draft vocabulary from the answers."""
        device, size = self.target.device, self.target.config.vocab_size
        self.vocabulary = frequent_tokens(rows.tokens[answer_mask(rows)], size, self.cover).to(
            device
        )
        many = len(self.vocabulary)
        self._index = torch.full((size,), many, device=device)
        self._index[self.vocabulary] = torch.arange(many, device=device)
        self._head = self.target.head[self.vocabulary].contiguous()
        if not self.chained:
            self.weights["follow.before.weight"] = torch.randn(many + 1, self.rank).to(device)
            self.weights["follow.after.weight"] = torch.zeros(many, self.rank, device=device)

    def loss(self, rows: TrainingRows, numbers: torch.Generator) -> torch.Tensor:
        """Cross-entropy of all heads at random positions of the answers."""
        anchors = sample_anchors(rows, self.anchors, numbers)
        scores, right, inside = self._scores(rows, anchors, self._last_hidden(rows))
        many = len(self.vocabulary)
        counted = inside & (right < many)
        weights = self.decay ** torch.arange(self.heads, device=right.device) * counted
        flat = right.clamp(max=many - 1).flatten()
        losses = fn.cross_entropy(scores.flatten(0, 2), flat, reduction="none")
        return (losses.view_as(weights) * weights).sum() / weights.sum().clamp(min=1e-6)

    @torch.no_grad()
    def measure(self, held: TrainingRows) -> Measurement:
        """Acceptance length of a chain, from every position of greedy texts."""
        own = sum(v.numel() for name, v in self.weights.items() if "before" not in name)
        return measure_chains(
            held.to(self.target.device),
            self._count_correct,
            self.heads,
            (own + self.heads**self.chained * self._head.numel()) / self.target.size,
            {"vocabulary": float(len(self.vocabulary))},
        )

    def config(self) -> dict[str, Any]:
        return {"heads": self.heads, "chained": self.chained, "inner": self.inner}

    def state(self) -> dict[str, torch.Tensor]:
        return {"vocabulary": self.vocabulary.int()}

    # --- one batch --------------------------------------------------------------------------------

    def _last_hidden(self, rows: TrainingRows) -> torch.Tensor:
        last = self.target.config.layers
        return self.target.hidden_states(rows.tokens, (last,))[last]

    def _scores(
        self, rows: TrainingRows, anchors: torch.Tensor, last: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For each anchor (the last settled token) and head: scores over the draft vocabulary, the
        index of the correct token, and whether it is within the text.
        """
        tokens, length = rows.tokens, rows.tokens.shape[1]
        at = torch.arange(len(tokens), device=tokens.device)[:, None]
        places = anchors[..., None] + torch.arange(self.heads + 1, device=tokens.device)
        told = tokens[at[..., None], places.clamp(max=length - 1)]
        hidden = last[at, (anchors - 1).clamp(min=0)]
        front = fn.embedding(told[..., :-1], self.target.embedding) if self.chained else None
        eps = self.target.config.norm_eps
        found = head_hidden(self.weights, self.heads, eps, hidden, front)
        right, inside = self._index[told[..., 1:]], places[..., 1:] < rows.stops[:, None, None]
        if self.chained:
            return fn.linear(found, self._head.to(found)).float(), right, inside
        before = fn.embedding(self._index[told[..., :-1]], self.weights["follow.before.weight"])
        after = self.weights["follow.after.weight"]
        return draft_scores(found, before, self._head.to(found), after), right, inside

    def _count_correct(self, rows: TrainingRows) -> torch.Tensor:
        """Number of correct draft tokens after each position of answers; -1 elsewhere: [rows,
        length].
        """
        runs, last = torch.full_like(rows.tokens, -1), self._last_hidden(rows)
        first, stop = int(rows.starts.min()) - 1, int(rows.stops.max()) - 1
        for low in range(first, stop, self.anchors):
            places = torch.arange(low, min(low + self.anchors, stop), device=runs.device)
            anchors = places.expand(len(rows), -1)
            with self.target.autocast():
                scores, right, inside = self._scores(rows, anchors, last)
            hits = (scores.argmax(-1) == right) & inside & (anchors > 0)[..., None]
            runs[:, places] = hits.long().cumprod(-1).sum(-1)
        return runs
