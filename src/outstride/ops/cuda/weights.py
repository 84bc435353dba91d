"""`PackedLayer`: the weights of a layer, laid out as the kernels read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from outstride.ops.cuda.matrices import PackedMatrix
from outstride.ops.weights import LayerWeights, ModelShape


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """Queries, keys and values by padded heads; halves that RoPE rotates, and gate and up, in pairs."""

    qkv: PackedMatrix
    output: PackedMatrix
    gate_up: PackedMatrix
    down: PackedMatrix
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None

    @classmethod
    def pack(
        cls,
        layer: LayerWeights,
        shape: ModelShape,
        head_width: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> PackedLayer:
        """Takes a layer over; `head_width` is the padded size of a head."""
        size, rotated = shape.head_dim, shape.heads + shape.kv_heads
        pairs = torch.stack([torch.arange(size // 2), torch.arange(size // 2) + size // 2], dim=1)

        def by_head(rows: torch.Tensor) -> torch.Tensor:
            """Each head padded, the halves that RoPE rotates against each other made neighbours."""
            heads = rows.reshape(-1, size, *rows.shape[1:])
            order = pairs.reshape(-1).to(rows.device)
            padded = rows.new_zeros(len(heads), head_width, *rows.shape[1:])
            padded[:rotated, :size] = heads[:rotated].index_select(1, order)
            padded[rotated:, :size] = heads[rotated:]
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
        ) -> PackedMatrix:
            return PackedMatrix.pack(weight, bias, before, device, dtype)

        mixed = layer.output.unflatten(1, (shape.heads, size))
        if head_width != size:
            mixed = torch.nn.functional.pad(mixed, (0, head_width - size))
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
