"""Adapters in the native format: float32, in tiles of sixteen channels as the products come."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from outstride.core.graph import FloatArray
from outstride.ops.contract import AdapterWeights, LowRank
from outstride.ops.cpu import native
from outstride.ops.cpu.packed import alternating
from outstride.ops.cpu.weights import Layer


@dataclass(slots=True)
class Adapter:
    """What an adapter adds to the products of all layers."""

    layers: list[ctypes.Array[native.LowRank]]
    ranks: int
    """The most values that a row is reduced to."""
    _held: list[npt.NDArray[Any]]
    """What the structures point to."""

    @classmethod
    def pack(
        cls, layers: Sequence[AdapterWeights], own: Sequence[Layer], widths: tuple[int, int, int]
    ) -> Adapter:
        """widths: of the rows of states, of all heads together, and of the middle."""
        held: list[npt.NDArray[Any]] = []
        found, ranks = [], 0
        width, heads, middle = widths
        for weights, layer in zip(layers, own, strict=True):
            parts = (
                (weights.qkv, width, layer.qkv.tiles, False),
                (weights.output, heads, layer.output.tiles, False),
                (weights.gate_up, width, layer.gate_up.tiles, True),
                (weights.down, middle, layer.down.tiles, False),
            )
            structs = [_pack(held, *part) for part in parts]
            found.append((native.LowRank * len(structs))(*structs))
            ranks = max(ranks, *(struct.rank for struct in structs))
        return cls(found, ranks, held)


def _pack(
    held: list[npt.NDArray[Any]], low: LowRank, width: int, tiles: int, turns: bool
) -> native.LowRank:
    rank, columns = low.low.shape
    narrow = np.zeros((rank, width), dtype=np.float32)
    narrow[:, :columns] = low.low.numpy()
    raised: FloatArray = low.high.numpy()
    if turns:
        raised = alternating(raised)
    whole = np.zeros((tiles * 16, rank), dtype=np.float32)
    whole[: len(raised)] = raised
    high = np.ascontiguousarray(whole.reshape(tiles, 16, rank).transpose(0, 2, 1))
    used: npt.NDArray[np.bool_] = (high != 0.0).any(axis=2)
    first = used.argmax(axis=1)
    last = np.where(used.any(axis=1), rank - used[:, ::-1].argmax(axis=1), first)
    parts = np.stack([first, last - first], axis=1).astype(np.int32)
    held += [narrow, high, parts]
    return native.LowRank(narrow.ctypes.data, high.ctypes.data, parts.ctypes.data, rank)
