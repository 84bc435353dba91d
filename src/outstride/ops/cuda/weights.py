"""`Layer`: the weights of a layer, laid out as the kernels read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from outstride.ops.contract import LayerWeights, Shape
from outstride.ops.cuda.matrices import Matrix


@dataclass(frozen=True, slots=True)
class Layer:
    """Queries, keys and values by padded heads; the halves that turn, and gate and up, in pairs."""

    qkv: Matrix
    output: Matrix
    gate_up: Matrix
    down: Matrix
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None

    @classmethod
    def pack(
        cls,
        layer: LayerWeights,
        shape: Shape,
        wide: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Layer:
        """Takes a layer over; `wide` is the padded size of a head."""
        size, turned = shape.head_dim, shape.heads + shape.kv_heads
        pairs = torch.stack([torch.arange(size // 2), torch.arange(size // 2) + size // 2], dim=1)

        def by_head(rows: torch.Tensor) -> torch.Tensor:
            """Each head padded, the halves that turn against each other made neighbours."""
            heads = rows.reshape(-1, size, *rows.shape[1:])
            order = pairs.reshape(-1).to(rows.device)
            padded = rows.new_zeros(len(heads), wide, *rows.shape[1:])
            padded[:turned, :size] = heads[:turned].index_select(1, order)
            padded[turned:, :size] = heads[turned:]
            return padded.flatten(0, 1)

        def paired(rows: torch.Tensor) -> torch.Tensor:
            """Gate and up made neighbours."""
            both: torch.Tensor = rows.unflatten(0, (2, -1))
            return both.transpose(0, 1).flatten(0, 1)

        def maybe(
            change: Callable[[torch.Tensor], torch.Tensor], bias: torch.Tensor | None
        ) -> torch.Tensor | None:
            return None if bias is None else change(bias)

        def norm(weight: torch.Tensor | None) -> torch.Tensor | None:
            return None if weight is None else weight.to(device, torch.float32)

        def matrix(
            weight: torch.Tensor, bias: torch.Tensor | None, before: torch.Tensor | None
        ) -> Matrix:
            return Matrix.pack(weight, bias, before, device, dtype)

        mixed = layer.output.unflatten(1, (shape.heads, size))
        if wide != size:
            mixed = torch.nn.functional.pad(mixed, (0, wide - size))
        return cls(
            qkv=matrix(by_head(layer.qkv), maybe(by_head, layer.qkv_bias), layer.attention_norm),
            output=matrix(mixed.flatten(1), layer.output_bias, None),
            gate_up=matrix(
                paired(layer.gate_up), maybe(paired, layer.gate_up_bias), layer.mlp_norm
            ),
            down=matrix(layer.down, layer.down_bias, None),
            query_norm=norm(layer.query_norm),
            key_norm=norm(layer.key_norm),
        )
