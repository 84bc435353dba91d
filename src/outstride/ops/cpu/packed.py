"""Weights in the native format: int8 in tiles of sixteen channels, one scale per channel."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from outstride.core.graph import FloatArray, IntArray
from outstride.ops.cpu import native

SLICE = 8192
"""So many products of 8 by 12 bits fit into 32 bits."""


def rounded(size: int, to: int) -> int:
    """`size` rounded up to a multiple."""
    return -(-size // to) * to


@dataclass(slots=True)
class Packed:
    """A matrix [channels, k], ready for the kernels."""

    data: npt.NDArray[np.int8]
    scale: FloatArray
    sums: npt.NDArray[np.int32]
    bias: FloatArray | None
    channels: int
    k: int
    tiles: int
    depth: int
    struct: native.Matrix = field(init=False)

    def __post_init__(self) -> None:
        expected = (self.tiles * self.depth * 16, self.tiles * 16)
        if self.data.size != expected[0] or self.scale.size != expected[1]:
            raise ValueError("packed weights of another size")
        self.struct = native.Matrix(
            self.data.ctypes.data,
            self.scale.ctypes.data,
            self.sums.ctypes.data,
            None if self.bias is None else self.bias.ctypes.data,
            self.tiles,
            self.depth,
        )

    @classmethod
    def of(cls, weight: FloatArray, bias: FloatArray | None, depth: int) -> Packed:
        """Quantizes a matrix; `depth` is the width of the rows that it will be multiplied with."""
        channels, k = weight.shape
        if depth < k or depth % 16:
            raise ValueError(f"a depth of {depth} for {k} columns")
        weight = np.ascontiguousarray(weight, dtype=np.float32)
        tiles = rounded(channels, 32) // 16
        data = np.empty(tiles * depth * 16, dtype=np.int8)
        scale = np.empty(tiles * 16, dtype=np.float32)
        sums = np.empty(-(-depth // SLICE) * tiles * 16, dtype=np.int32)
        native.library().outstride_pack(
            weight.ctypes.data,
            channels,
            k,
            tiles,
            depth,
            data.ctypes.data,
            scale.ctypes.data,
            sums.ctypes.data,
        )
        if bias is not None:
            bias = np.concatenate([bias, np.zeros(tiles * 16 - channels)]).astype(np.float32)
        return cls(data, scale, sums, bias, channels, k, tiles, depth)

    @property
    def stride(self) -> int:
        """Width of a row of results."""
        return self.tiles * 16

    def rows(self, ids: IntArray, width: int) -> FloatArray:
        """Single rows as float32, `width` wide."""
        if len(ids) and not (ids.min() >= 0 and ids.max() < self.channels):
            raise ValueError("a row outside the matrix")
        ids = np.ascontiguousarray(ids, dtype=np.int64)
        out = np.zeros((len(ids), width), dtype=np.float32)
        native.library().outstride_rows(
            ctypes.byref(self.struct), ids.ctypes.data, len(ids), self.k, width, out.ctypes.data
        )
        return out


def alternating(weight: FloatArray) -> FloatArray:
    """Gate and up channels in turns of sixteen, as the kernels multiply them."""
    gate, up = np.split(weight, 2)
    size = rounded(len(gate), 16)
    turns = np.zeros((size // 16, 2, 16, *weight.shape[1:]), dtype=np.float32)
    for which, half in enumerate((gate, up)):
        padded = np.zeros((size, *weight.shape[1:]), dtype=np.float32)
        padded[: len(half)] = half
        turns[:, which] = padded.reshape(size // 16, 16, *weight.shape[1:])
    return turns.reshape(2 * size, *weight.shape[1:])
