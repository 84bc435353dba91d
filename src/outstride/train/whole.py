"""What recipes that change a model itself have in common: all its weights, read over rows of text."""

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
from outstride.train.layers import Pair, Shape, Weights, layer, norm, turns, within
from outstride.train.recipe import Recipe
from outstride.train.target import Target
from outstride.train.words import replacing

_AT_ONCE = 1 << 27
"""Logits that exist at a time; those of further positions wait for their turn."""


class Reader:
    """A model as torch differentiates it: rows of text in, normalised states out."""

    def __init__(self, config: DecoderConfig, weights: Weights, device: str) -> None:
        self.config = config
        self.weights = weights
        self._device = device
        self._shape = Shape.of(config)
        self._turns: dict[int, Pair] = {}

    @property
    def head(self) -> torch.Tensor:
        """The matrix that scores tokens: [vocabulary, width]."""
        tied = "model.embed_tokens.weight" if self.config.tied else "lm_head.weight"
        return self.weights[tied]

    def states(
        self, tokens: torch.Tensor, sees: torch.Tensor, places: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What leaves the final norm: [rows, nodes, width].

        sees: which node sees which, [rows, nodes, nodes]. places: the position of each node, [rows,
        nodes]; else they stand one behind the other.
        """
        if places is None:
            places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        longest = tokens.shape[1] if tokens.numel() == 0 else int(places.max()) + 1
        cos, sin = self._turn(longest)
        turn = (cos[places], sin[places])
        x = fn.embedding(tokens, self.weights["model.embed_tokens.weight"]).float()
        for i in range(self.config.layers):
            window, seen = self.config.windows[i], sees
            if window is not None:
                seen = seen & (places[:, :, None] - places[:, None] < window)
            own = within(self.weights, f"model.layers.{i}.")
            turned = turn if self.config.rope_layers[i] else None
            x = layer(self._shape, own, x, turned, seen[:, None])
        return norm(x, self.weights["model.norm.weight"], self._shape.eps)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """What states that left the final norm say."""
        return fn.linear(states, self.head.to(states)).float()

    def over(
        self, states: torch.Tensor, found: Callable[..., torch.Tensor], *others: torch.Tensor
    ) -> torch.Tensor:
        """`found` of the logits of states [nodes, width] and of what belongs to them, in parts.

        Where there are many, they are computed anew on the way back.
        """
        parts = max(1, -(-len(states) * len(self.head) // _AT_ONCE))
        tables = [table.tensor_split(parts) for table in (states, *others)]

        def each(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            return found(self.logits(x), *rest)

        if parts == 1:
            return each(states, *others)
        again = torch.is_grad_enabled()
        return torch.cat(
            [
                checkpoint(each, *given, use_reentrant=False) if again else each(*given)
                for given in zip(*tables, strict=True)
            ]
        )

    def _turn(self, length: int) -> Pair:
        length = 1 << max(length - 1, 1).bit_length()
        if length not in self._turns:
            self._turns[length] = turns(self.config, length, self._device)
        return self._turns[length]


class Whole(Recipe):
    """A recipe whose weights are the model's own, under their common names.

    What it leaves is a checkpoint folder that loads as the original does. `target` stays as it was:
    it is the teacher.
    """

    changes_target: ClassVar[bool] = True

    def __init__(self, target: Target, **options: Any) -> None:
        del options
        if target.tokenizer is None:
            raise ValueError("needs a model with its tokenizer")
        self.target = target
        self._beside = save.beside(locate(target.name), target.config, target.tokenizer)
        self.weights = {
            name: value.detach().to(torch.float32, copy=True)
            for name, value in target.weights.items()
        }
        self.reader = Reader(target.config, self.weights, target.device)
        self.teacher = Reader(target.config, target.weights, target.device)

    def write(self, folder: Path, about: Mapping[str, Any], *, int8: bool) -> int:
        del about, int8
        for name, text in self._beside.items():
            with replacing(folder / name) as fresh:
                fresh.write_text(text, encoding="utf-8")
        with replacing(folder / MODEL) as fresh:  # the last: a folder that has it is whole
            save_file(save.stored(self.target.config, self.weights), fresh, {"format": "pt"})
        return (folder / MODEL).stat().st_size
