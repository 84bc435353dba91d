"""LoRA adapters in the native format: float32, in tiles of sixteen output channels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from outstride.core.graph import FloatArray
from outstride.ops.cpu import native
from outstride.ops.cpu.int8 import alternating
from outstride.ops.cpu.weights import PackedLayerWeights
from outstride.ops.weights import AdapterWeights, LoraWeights

PRODUCTS = 4
"""Of a layer: qkv, output, gate_up and down."""


class PackedAdapters:
    """What LoRA adapters add to the products of all layers. Adapters are numbered from 1 on."""

    def __init__(self) -> None:
        self._layers: list[list[list[native.LoraStruct]] | None] = []
        """For each number the products of its layers; None: the number is free."""
        self._held: list[list[npt.NDArray[Any]]] = []
        """For each number the arrays that its structures point to."""
        self._arrays: dict[int, ctypes.Array[native.LoraStruct]] = {}
        """What the structure of each layer points to."""

    def __bool__(self) -> bool:
        return any(layers is not None for layers in self._layers)

    @property
    def max_rank(self) -> int:
        """The largest rank of any product."""
        ranks: list[int] = [
            struct.rank for adapter in self._layers for layer in adapter or () for struct in layer
        ]
        return max(ranks)

    def add(
        self,
        layers: Sequence[AdapterWeights],
        own: Sequence[PackedLayerWeights],
        widths: tuple[int, int, int],
    ) -> int:
        """Packs an adapter; returns its number.

        own: the model's layers. widths: padded, of hidden states, of all heads, of the MLP.
        """
        held: list[npt.NDArray[Any]] = []
        width, heads, inner = widths
        found = []
        for weights, layer in zip(layers, own, strict=True):
            products = (
                (weights.qkv, width, layer.qkv.tiles, False),
                (weights.output, heads, layer.output.tiles, False),
                (weights.gate_up, width, layer.gate_up.tiles, True),
                (weights.down, inner, layer.down.tiles, False),
            )
            found.append([_pack(held, *product) for product in products])
        free = [i for i, layers in enumerate(self._layers) if layers is None]
        if not free:
            free = [len(self._layers)]
            self._layers.append(None)
            self._held.append([])
        self._layers[free[0]], self._held[free[0]] = found, held
        return free[0] + 1

    def remove(self, number: int) -> None:
        """Drops an adapter; its number is free then."""
        self._layers[number - 1], self._held[number - 1] = None, []

    def of_layer(self, layer: int) -> ctypes.Array[native.LoraStruct]:
        """[adapters * 4]: what each adapter adds to the products of a layer."""
        nothing = [native.LoraStruct()] * PRODUCTS
        found = [
            struct
            for adapter in self._layers
            for struct in (nothing if adapter is None else adapter[layer])
        ]
        self._arrays[layer] = (native.LoraStruct * len(found))(*found)
        return self._arrays[layer]


def _pack(
    held: list[npt.NDArray[Any]], lora: LoraWeights | None, width: int, tiles: int, gated: bool
) -> native.LoraStruct:
    """One product: a [rank, width], b [tiles, rank, 16], and which ranks each tile uses, [tiles, 2].

    gated: whether gate and up channels alternate, as in the product that it is added to.
    """
    if lora is None:
        return native.LoraStruct()  # of rank 0: it adds nothing
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
