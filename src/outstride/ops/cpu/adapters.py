"""LoRA adapters in the native format: float32, in tiles of sixteen output channels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from outstride.core.graph import FloatArray
from outstride.ops.cpu import native
from outstride.ops.cpu.int8 import alternating
from outstride.ops.cpu.weights import PackedLayerWeights
from outstride.ops.weights import AdapterWeights, LoraWeights


@dataclass(slots=True)
class PackedAdapter:
    """What a LoRA adapter adds to the products of all layers."""

    layers: list[ctypes.Array[native.LoraStruct]]
    max_rank: int
    _held: list[npt.NDArray[Any]]
    """The arrays that the structures point to."""

    @classmethod
    def pack(
        cls,
        layers: Sequence[AdapterWeights],
        own: Sequence[PackedLayerWeights],
        widths: tuple[int, int, int],
    ) -> PackedAdapter:
        """own: the model's layers. widths: padded, of hidden states, of all heads, of the MLP."""
        held: list[npt.NDArray[Any]] = []
        found, max_rank = [], 0
        width, heads, inner = widths
        for weights, layer in zip(layers, own, strict=True):
            products = (
                (weights.qkv, width, layer.qkv.tiles, False),
                (weights.output, heads, layer.output.tiles, False),
                (weights.gate_up, width, layer.gate_up.tiles, True),
                (weights.down, inner, layer.down.tiles, False),
            )
            structs = [_pack(held, *product) for product in products]
            found.append((native.LoraStruct * len(structs))(*structs))
            max_rank = max(max_rank, *(struct.rank for struct in structs))
        return cls(found, max_rank, held)


def _pack(
    held: list[npt.NDArray[Any]], lora: LoraWeights, width: int, tiles: int, gated: bool
) -> native.LoraStruct:
    """One product: a [rank, width], b [tiles, rank, 16], and which ranks each tile uses, [tiles, 2].

    gated: whether gate and up channels alternate, as in the product that it is added to.
    """
    rank, columns = lora.a.shape
    a = np.zeros((rank, width), dtype=np.float32)
    a[:, :columns] = lora.a.numpy()
    rows: FloatArray = lora.b.numpy()
    if gated:
        rows = alternating(rows)
    padded = np.zeros((tiles * 16, rank), dtype=np.float32)
    padded[: len(rows)] = rows
    b = np.ascontiguousarray(padded.reshape(tiles, 16, rank).transpose(0, 2, 1))
    used: npt.NDArray[np.bool_] = (b != 0.0).any(axis=2)
    first = used.argmax(axis=1)
    last = np.where(used.any(axis=1), rank - used[:, ::-1].argmax(axis=1), first)
    ranks = np.stack([first, last - first], axis=1).astype(np.int32)
    held += [a, b, ranks]
    return native.LoraStruct(a.ctypes.data, b.ctypes.data, ranks.ctypes.data, rank)
