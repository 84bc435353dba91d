"""`Target`: the frozen model that a draft head is trained for, over whole rows of text in torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as fn

from outstride.errors import UnsupportedModel
from outstride.models.config import DecoderConfig
from outstride.models.load import locate, opened
from outstride.models.tokenizer import Tokenizer
from outstride.models.weights import check
from outstride.ops.weights import unusual_layers
from outstride.train.layers import LayerShape, Pair, layer, norm, rope_tables, within

Layer = Callable[..., torch.Tensor]


@dataclass(slots=True)
class Target:
    """A model's weights under their common names, and its hidden states.

    On a GPU, matrices are bfloat16 and everything else is float32, hidden states included; on a CPU
    everything is float32. Nothing here has a gradient. digest: names the vocabulary, as
    `Tokenizer.digest` does.
    """

    config: DecoderConfig
    weights: dict[str, torch.Tensor]
    device: str
    tokenizer: Tokenizer | None = None
    name: str = ""
    digest: str = ""
    _layer: Layer = field(default=layer, init=False, repr=False)
    _layers: list[dict[str, torch.Tensor]] = field(default_factory=list, init=False, repr=False)
    _rope_tables: dict[int, Pair] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        config = self.config
        if unusual_layers(config) or config.rotary is not None:
            raise UnsupportedModel(
                f"draft heads cannot be trained for {config.architecture} models yet: only for dense "
                "layers without clipping or norms over all heads"
            )
        check(config, self.weights)
        half = torch.bfloat16 if self.on_gpu else torch.float32
        for name, value in self.weights.items():
            kind = half if value.dim() > 1 else torch.float32
            self.weights[name] = value.detach().to(self.device, kind)
        self._layers = [within(self.weights, f"model.layers.{i}.") for i in range(config.layers)]

    @classmethod
    def load(cls, name: str, device: str = "cpu") -> Target:
        """From an alias, a GGUF file, a checkpoint folder or a hub id."""
        config, open_model, tokenizer = opened(locate(name))
        return cls(config, open_model().read(), device, tokenizer, name, tokenizer.digest)

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"

    @property
    def embedding(self) -> torch.Tensor:
        return self.weights["model.embed_tokens.weight"]

    @property
    def head(self) -> torch.Tensor:
        """The LM head: [vocabulary, width]."""
        return self.embedding if self.config.tied else self.weights["lm_head.weight"]

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        """The weights of one layer."""
        return self._layers[index]

    @property
    def size(self) -> int:
        """Number of weights that a pass reads."""
        shapes = self.config.shapes().items()
        every = sum(math.prod(shape) for name, shape in shapes if "embed" not in name)
        return every + (self.embedding.numel() if self.config.tied else 0)

    def compile(self, **how: Any) -> None:
        """Compiles the layers, which share one program for each shape of rows."""
        self._layer = torch.compile(layer, dynamic=False, **how)

    def autocast(self) -> torch.autocast:
        """Matrix products in bfloat16 on a GPU, in float32 elsewhere."""
        kind = torch.device(self.device).type
        return torch.autocast(kind, torch.bfloat16, enabled=self.on_gpu)

    @torch.no_grad()
    def hidden_states(
        self, tokens: torch.Tensor, taps: Sequence[int], mask: torch.Tensor | None = None
    ) -> dict[int, torch.Tensor]:
        """Inputs of each of these layers over rows of text: [rows, length, width].

        The number of layers stands for the output of the last one, before the final norm. Attention
        is causal, or as `sees` says: [rows, length, length].
        """
        config, found = self.config, {}
        if any(not 0 <= tap <= config.layers for tap in taps):
            raise ValueError(f"hidden states enter layers 0 to {config.layers}, not {list(taps)}")
        length = tokens.shape[1]
        x = fn.embedding(tokens, self.embedding).float()
        with self.autocast():
            for i in range(max(taps, default=0) + 1):
                if i in taps:
                    found[i] = x
                if i < max(taps, default=0):
                    rope = self._rope(length) if config.rope_layers[i] else None
                    seen = self._seen(config.windows[i], length, mask)
                    x = self._layer(LayerShape.of(config), self._layers[i], x, rope, seen)
        return found

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token logits of hidden states that left the last layer."""
        with self.autocast():
            y = norm(hidden, self.weights["model.norm.weight"], self.config.norm_eps)
            return fn.linear(y, self.head).float()

    def about(self) -> Mapping[str, int | str]:
        """What a draft head records of its target."""
        config = self.config
        return {
            "name": self.name,
            "hidden_size": config.hidden_size,
            "layers": config.layers,
            "vocab_size": config.vocab_size,
            "vocabulary": self.digest,
        }

    def _rope(self, length: int) -> Pair:
        if length not in self._rope_tables:
            self._rope_tables[length] = rope_tables(self.config, length, self.device)
        return self._rope_tables[length]

    def _seen(
        self, window: int | None, length: int, mask: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Attention mask of one layer; None: causal. A window counts the position itself."""
        if window is None or window >= length:
            return None if mask is None else mask[:, None]
        places = torch.arange(length, device=self.device)
        back = places[:, None] - places[None]
        near = back < window
        return (near & (back >= 0)) if mask is None else (near & mask)[:, None]
