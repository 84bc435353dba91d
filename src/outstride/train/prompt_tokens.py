"""`prompt-tokens`: a few trained embeddings with which the target itself predicts further tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as fn

from outstride.core.contracts import CAUSAL
from outstride.train.acceptance_length import measure_chains, sample_anchors
from outstride.train.corpus_files import TrainingRows
from outstride.train.layers import LayerShape, Pair, layer, norm, project_heads, rope_tables, within
from outstride.train.recipe import Measurement, Recipe, recipe
from outstride.train.target import Target


@recipe("prompt-tokens")
class PromptTokensRecipe(Recipe):
    """A few trained input embeddings, appended to a text, that let the target itself draft several
    tokens.

    They stand at the positions of the next tokens; each sees the text and those before it, and
    predicts the token after its position. Only these embedding rows are trained.

    count: how many. kept: candidates of each that a draft tree may use. anchors: positions per text
    and step. decay: weight of an input relative to the one before it.

    Paper: Parallel Prompt Decoding (PPD), PaSS
    Makes: prompt-tokens
    """

    def __init__(
        self,
        target: Target,
        *,
        count: int = 3,
        kept: int = 8,
        anchors: int = 16,
        decay: float = 0.8,
    ) -> None:
        if min(count, anchors) < 1 or not 1 <= kept <= 16:
            raise ValueError("needs count and anchors of 1 or more, and kept from 1 to 16")
        if not 0 < decay <= 1:
            raise ValueError("needs decay above 0 and up to 1")
        if target.config.attention_pattern != CAUSAL:
            raise ValueError("drafts for autoregressive models, not for masked ones")
        self.target, self.count = target, count
        self.kept = min(kept, target.config.vocab_size)
        self.anchors, self.decay = anchors, decay
        near = float(target.embedding.float().std())
        fresh = near * torch.randn(count, target.config.hidden_size)
        self.weights = {"prompt.weight": fresh.to(target.device)}
        self._layers = [
            within(target.weights, f"model.layers.{i}.") for i in range(target.config.layers)
        ]
        self._rope_tables: dict[int, Pair] = {}
        self._ranks = torch.zeros(count, self.kept)

    def loss(self, rows: TrainingRows, numbers: torch.Generator) -> torch.Tensor:
        """Cross-entropy of the inputs' predictions after random positions of the answers."""
        scores, right, inside = self._scores(rows, sample_anchors(rows, self.anchors, numbers))
        weights = self.decay ** torch.arange(self.count, device=right.device) * inside
        losses = fn.cross_entropy(scores.flatten(0, 2), right.flatten(), reduction="none")
        return (losses.view_as(weights) * weights).sum() / weights.sum().clamp(min=1e-6)

    @torch.no_grad()
    def measure(self, held: TrainingRows) -> Measurement:
        """Acceptance length of a chain, and acceptance rates of candidates by depth and rank.

        A candidate counts where all earlier tokens of the text were among the candidates as well:
        only there does a tree reach it.
        """
        device = self.target.device
        self._found = torch.zeros(self.count, self.kept, device=device)
        self._asked = torch.zeros(self.count, 1, device=device)
        measured = measure_chains(held.to(device), self._count_correct, self.count, 0.0, {})
        self._ranks = (self._found / self._asked.clamp(min=1)).cpu()
        return measured

    def config(self) -> dict[str, Any]:
        return {"count": self.count, "kept": self.kept}

    def state(self) -> dict[str, torch.Tensor]:
        return {"ranks": self._ranks}

    # --- one batch --------------------------------------------------------------------------------

    def _scores(
        self, rows: TrainingRows, anchors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For each anchor (the last settled token, at whose position the first input stands) and
        input: scores of all tokens, the correct token, and whether it is within the text.
        """
        tokens, length = rows.tokens, rows.tokens.shape[1]
        nodes = anchors[..., None] + torch.arange(self.count, device=tokens.device)
        hidden = self._input_hidden(rows, anchors, nodes.flatten(1))
        y = norm(hidden, self.target.weights["model.norm.weight"], self.target.config.norm_eps)
        scores = fn.linear(y, self.target.head.to(y)).float()
        at = torch.arange(len(tokens), device=tokens.device)[:, None, None]
        right = tokens[at, (nodes + 1).clamp(max=length - 1)]
        inside = (nodes + 1 < rows.stops[:, None, None]) & (anchors > 0)[..., None]
        return scores.view(*nodes.shape, -1), right, inside

    def _input_hidden(
        self, rows: TrainingRows, anchors: torch.Tensor, nodes: torch.Tensor
    ) -> torch.Tensor:
        """Outputs of the last layer at the inputs: [rows, inputs, width]. The text, which does not
        see them, runs through the layers in parallel.
        """
        config, length, device = self.target.config, rows.tokens.shape[1], rows.tokens.device
        shape, (cos, sin) = LayerShape.of(config), self._rope(length + self.count)
        text, rope = (cos[:length], sin[:length]), (cos[nodes], sin[nodes])
        own = torch.arange(anchors.shape[1], device=device).repeat_interleave(self.count)
        order = torch.arange(len(own), device=device)
        keys = torch.arange(length, device=device)
        before = keys < anchors[:, own, None]
        chain = (own[:, None] == own) & (order[:, None] >= order)
        mask = torch.cat([before, chain.expand(len(rows), -1, -1)], dim=-1)[:, None]
        back = nodes[..., None] - torch.cat([keys.expand(len(rows), -1), nodes], dim=1)[:, None]
        x = fn.embedding(rows.tokens, self.target.embedding).float()
        z = self.weights["prompt.weight"].repeat(anchors.shape[1], 1).expand(len(rows), -1, -1)
        for i, weights in enumerate(self._layers):
            rotated, window = config.rope_layers[i], config.windows[i]
            with torch.no_grad():
                y = norm(x, weights["input_layernorm.weight"], shape.eps)
                text_kv = (
                    project_heads(shape, weights, y, "k", text if rotated else None),
                    project_heads(shape, weights, y, "v", None),
                )
                x = layer(
                    shape, weights, x, text if rotated else None, self._text_mask(window, keys)
                )
            near = mask if window is None else mask & (back < window)[:, None]
            z = layer(shape, weights, z, rope if rotated else None, near, text_kv)
        return z

    def _text_mask(self, window: int | None, keys: torch.Tensor) -> torch.Tensor | None:
        """Attention mask of the text in one layer; None: causal."""
        if window is None or window >= len(keys):
            return None
        back = keys[:, None] - keys
        return (back >= 0) & (back < window)

    def _count_correct(self, rows: TrainingRows) -> torch.Tensor:
        """Number of correct draft tokens after each position of answers; -1 elsewhere: [rows,
        length].
        """
        runs = torch.full_like(rows.tokens, -1)
        first, stop = int(rows.starts.min()) - 1, int(rows.stops.max()) - 1
        for low in range(first, stop, self.anchors):
            places = torch.arange(low, min(low + self.anchors, stop), device=runs.device)
            anchors = places.expand(len(rows), -1)
            with self.target.autocast():
                scores, right, inside = self._scores(rows, anchors)
            hits = (scores.topk(self.kept).indices == right[..., None]) & inside[..., None]
            runs[:, places] = hits[..., 0].long().cumprod(-1).sum(-1)
            within_answer = (anchors >= rows.starts[:, None] - 1)[..., None]
            reached = hits.any(-1).long().cumprod(-1).roll(1, dims=-1)
            reached[..., 0] = 1
            counted = reached.bool() & inside & within_answer
            self._found += (hits & counted[..., None]).sum((0, 1))
            self._asked += counted.sum((0, 1))[:, None]
        return runs

    def _rope(self, length: int) -> Pair:
        if length not in self._rope_tables:
            self._rope_tables[length] = rope_tables(self.target.config, length, self.target.device)
        return self._rope_tables[length]
