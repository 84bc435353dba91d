"""Trained parts on a card: entries made at the end of a pass, guesses in a pass of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from outstride.errors import UnsupportedModel
from outstride.ops.contract import GraftWeights, Shape
from outstride.ops.cuda.chain import Chain
from outstride.ops.cuda.head import Head
from outstride.ops.cuda.linear import FLOATS, HEADS, linear
from outstride.ops.cuda.matrices import Matrix, Scratch, Turn, up
from outstride.ops.cuda.weights import Layer


@dataclass(slots=True)
class Grafted:
    """One part: its layers behind the model's, and what makes their entries from the model's states."""

    first: int
    taps: tuple[int, ...]
    layers: list[Layer]
    digests: list[Matrix]
    """Queries, keys and values of each layer, under the norm of what was mixed."""
    mix: Matrix
    head: Head
    tapped: torch.Tensor
    """The states that were tapped in this pass, side by side."""
    mixed: torch.Tensor
    low: torch.Tensor
    scratch: Scratch

    @classmethod
    def pack(
        cls,
        weights: GraftWeights,
        shape: Shape,
        vocabulary: torch.Tensor,
        *,
        first: int,
        wide: int,
        rows: int,
        device: torch.device,
        dtype: torch.dtype,
        pdl: bool,
    ) -> Grafted:
        """Takes a part over; `vocabulary` is the model's head in float32."""
        if weights.mix is None or not weights.usual(shape):
            raise UnsupportedModel(
                "this published drafter does not run on a card yet; use weights int8, int4 or fp32"
            )

        def layer(one: Any) -> Layer:
            return Layer.pack(one, shape, wide, device, dtype)

        def room(count: int, width: int, kind: torch.dtype) -> torch.Tensor:
            return torch.zeros(count, width, dtype=kind, device=device)

        mix = Matrix.pack(weights.mix, None, weights.scale, device, dtype)
        listed = vocabulary[torch.from_numpy(weights.vocabulary).to(vocabulary.device)]
        width = up(shape.hidden_size, 256)
        chain = None
        if weights.before is not None and weights.after is not None:
            tables = weights.vocabulary, weights.before, weights.after
            chain = Chain(*tables, shape.vocab_size, device)
        head = Head(
            Matrix.pack(listed, None, weights.norm, device, dtype),
            shape.norm_eps,
            len(weights.vocabulary),
            width,
            device,
            dtype,
            pdl,
            weights.vocabulary,
            chain,
        )
        return cls(
            first=first,
            taps=weights.taps,
            layers=[layer(one) for one in weights.layers],
            digests=[
                layer(replace(one, attention_norm=weights.mixed)).qkv for one in weights.layers
            ],
            mix=mix,
            head=head,
            tapped=room(rows, mix.weight.shape[1], dtype),
            mixed=room(rows, width, torch.float32),
            low=room(rows, width, dtype),
            scratch=Scratch.make(device, rows),
        )

    def reserve(self, rows: int) -> None:
        """Room for passes of this size."""
        for name in ("tapped", "mixed", "low"):
            held = getattr(self, name)
            setattr(self, name, held.new_zeros(rows, held.shape[1]))
        self.scratch = Scratch.make(self.low.device, rows)

    def tap(self, layer: int, x: torch.Tensor, rows: int, size: int) -> None:
        """Takes down the states that enter a layer, if they are of use."""
        if layer in self.taps:
            at = self.taps.index(layer) * size
            self.tapped[:rows, at : at + size].copy_(x[:rows, :size])

    def digest(self, rows: int, eps: float, turns: Sequence[Turn], queries: torch.Tensor) -> None:
        """Makes the entries of all layers; `queries` is where nobody minds what is written."""
        linear(self.mix, self.tapped, rows, FLOATS, self.scratch, out=self.mixed, norm=eps)
        self.low[:rows].copy_(self.mixed[:rows])
        for matrix, turn in zip(self.digests, turns, strict=True):
            linear(matrix, self.low, rows, HEADS, self.scratch, low=queries, norm=eps, turn=turn)
