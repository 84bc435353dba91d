"""`ReferenceBatch`: what the reference backend works out once for a run of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outstride.ops.arithmetic import linear, pad
from outstride.ops.attention_plan import AttentionPlan
from outstride.ops.contract import Span
from outstride.ops.recurrent_plan import RecurrentPlan
from outstride.ops.weights import AdapterWeights


@dataclass(slots=True)
class ReferenceBatch:
    """What is worked out once for a run of layers; `rows` are padded to whole tiles."""

    spans: Sequence[Span]
    slots: torch.Tensor
    """[computed nodes]"""
    positions: torch.Tensor
    """[rows]"""
    ropes: dict[bool, tuple[torch.Tensor, torch.Tensor]]
    """Cosines and sines [rows, 1, head_dim / 2]; True: of layers with a window, where these differ."""
    plans: dict[tuple[int | None, int], AttentionPlan]
    """By window and number of KV heads."""
    growth: torch.Tensor | None = None
    """[rows, 1, 1]: the factor of queries by position (`Switches.query_growth`)."""
    per_layer: torch.Tensor | None = None
    """[rows, layers, width]: the input that each layer reads for itself (Gemma 4)."""
    embeddings: torch.Tensor | None = None
    """[rows, hidden]: what the layer of an EAGLE-3 head reads before the hidden states."""
    adapters: Sequence[tuple[Sequence[AdapterWeights], torch.Tensor]] = ()
    """Each adapter of the batch, and the indices of the rows that go through it."""
    recurrent: RecurrentPlan | None = None
    """Of the recurrent layers; None until the first of them runs."""
    gates: torch.Tensor | None = None
    """[rows, heads * head_dim]: what the layer under way multiplies its attention with."""

    def adapted(
        self, product: torch.Tensor, x: torch.Tensor, layer: int, which: str
    ) -> torch.Tensor:
        """product [rows, out] of x [rows, in], with what adapters add to `which` of this layer."""
        for layers, rows in self.adapters:
            if layer < len(layers) and (lora := getattr(layers[layer], which)) is not None:
                added = linear(linear(pad(x[rows]), lora.a), lora.b)
                product[rows] += added[: len(rows)]
        return product
