"""Recipes that change the model itself: all of its weights, differentiated over rows of text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch.nn import functional as fn
from torch.utils.checkpoint import checkpoint

from outstride.models import save
from outstride.models.config import DecoderConfig
from outstride.models.load import locate
from outstride.train.checkpoint import MODEL
from outstride.train.corpus_files import replacing
from outstride.train.layers import LayerShape, Pair, Weights, layer, norm, rope_tables, within
from outstride.train.recipe import Recipe
from outstride.train.target import Target

_AT_ONCE = 1 << 27
"""Logits in memory at once; larger batches are split."""


class DifferentiableModel:
    """A model in torch with gradients: rows of text in, normalized hidden states out."""

    def __init__(self, config: DecoderConfig, weights: Weights, device: str) -> None:
        self.config = config
        self.weights = weights
        self._device = device
        self._shape = LayerShape.of(config)
        self._rope_tables: dict[int, Pair] = {}

    @property
    def head(self) -> torch.Tensor:
        """The LM head: [vocabulary, width]."""
        tied = "model.embed_tokens.weight" if self.config.tied else "lm_head.weight"
        return self.weights[tied]

    def hidden_states(
        self, tokens: torch.Tensor, sees: torch.Tensor, places: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Outputs of the final norm: [rows, nodes, width].

        sees: attention mask, [rows, nodes, nodes]. places: position of each node, [rows, nodes];
        default: 0, 1, 2, …
        """
        if places is None:
            places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        longest = tokens.shape[1] if tokens.numel() == 0 else int(places.max()) + 1
        cos, sin = self._rope(longest)
        rope = (cos[places], sin[places])
        x = fn.embedding(tokens, self.weights["model.embed_tokens.weight"]).float()
        for i in range(self.config.layers):
            window, seen = self.config.windows[i], sees
            if window is not None:
                seen = seen & (places[:, :, None] - places[:, None] < window)
            own = within(self.weights, f"model.layers.{i}.")
            rotated = rope if self.config.rope_layers[i] else None
            x = layer(self._shape, own, x, rotated, seen[:, None])
        return norm(x, self.weights["model.norm.weight"], self._shape.eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states that left the final norm."""
        return fn.linear(hidden, self.head.to(hidden)).float()

    def map_logits(
        self, hidden: torch.Tensor, found: Callable[..., torch.Tensor], *others: torch.Tensor
    ) -> torch.Tensor:
        """Applies `found` to the logits of hidden states [nodes, width] and to further tensors, in
        chunks.

        Several chunks are recomputed in the backward pass.
        """
        chunks = max(1, -(-len(hidden) * len(self.head) // _AT_ONCE))
        tables = [table.tensor_split(chunks) for table in (hidden, *others)]

        def each(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            return found(self.logits(x), *rest)

        if chunks == 1:
            return each(hidden, *others)
        again = torch.is_grad_enabled()
        return torch.cat(
            [
                checkpoint(each, *given, use_reentrant=False) if again else each(*given)
                for given in zip(*tables, strict=True)
            ]
        )

    def _rope(self, length: int) -> Pair:
        length = 1 << max(length - 1, 1).bit_length()
        if length not in self._rope_tables:
            self._rope_tables[length] = rope_tables(self.config, length, self._device)
        return self._rope_tables[length]


class FullFinetuneRecipe(Recipe):
    """A recipe whose weights are the model's own, under their common names.

    Its result is a checkpoint folder that loads as the original does. `target` is unchanged and acts
    as the teacher.
    """

    changes_target: ClassVar[bool] = True

    def __init__(self, target: Target, **options: Any) -> None:
        del options
        if target.tokenizer is None:
            raise ValueError("needs a model with its tokenizer")
        self.target = target
        self._companion_files = save.companion_files(
            locate(target.name), target.config, target.tokenizer
        )
        self.weights = {
            name: value.detach().to(torch.float32, copy=True)
            for name, value in target.weights.items()
        }
        self.student = DifferentiableModel(target.config, self.weights, target.device)
        self.teacher = DifferentiableModel(target.config, target.weights, target.device)

    def write(self, folder: Path, about: Mapping[str, Any], *, int8: bool) -> int:
        del about, int8
        for name, text in self._companion_files.items():
            with replacing(folder / name) as fresh:
                fresh.write_text(text, encoding="utf-8")
        with replacing(folder / MODEL) as fresh:  # the last: a folder that has it is whole
            save_file(save.stored(self.target.config, self.weights), fresh, {"format": "pt"})
        return (folder / MODEL).stat().st_size
