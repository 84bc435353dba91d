"""int8 weights: tiles of sixteen channels, with a scale and a zero point per channel.

Weights and activations are Hadamard-rotated before they are quantized.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from outstride.core.graph import FloatArray, IntArray
from outstride.core.host_library import address
from outstride.ops.cpu import native
from outstride.ops.cpu.hadamard import HadamardRotation
from outstride.ops.matrix_rows import DenseRows, MatrixRows, alternating_rows, pack_all


def rounded(size: int, to: int) -> int:
    """`size` rounded up to a multiple."""
    return -(-size // to) * to


@dataclass(slots=True)
class Int8Matrix:
    """An int8 matrix [channels, k] in the layout of the kernels."""

    data: npt.NDArray[np.uint8]
    scale: FloatArray
    zero: npt.NDArray[np.int32]
    bias: FloatArray | None
    channels: int
    k: int
    tiles: int
    depth: int
    struct: native.MatrixStruct = field(init=False)
    pointer: Any = field(init=False)

    def __post_init__(self) -> None:
        expected = (self.tiles * self.depth * 16, self.tiles * 16)
        if (self.data.size, self.scale.size, self.zero.size) != (*expected, expected[1]):
            raise ValueError("int8 weights of the wrong size")
        self.struct = native.MatrixStruct(
            self.data.ctypes.data,
            self.scale.ctypes.data,
            self.zero.ctypes.data,
            None if self.bias is None else self.bias.ctypes.data,
            HadamardRotation.of(self.depth).pointer,
            self.tiles,
            self.depth,
            8,
        )
        self.pointer = ctypes.pointer(self.struct)

    @classmethod
    def empty(
        cls,
        channels: int,
        k: int,
        depth: int,
        *,
        bias: bool = False,
        memory: npt.NDArray[np.uint8] | None = None,
    ) -> Self:
        """A matrix to be filled; `depth` is the width of the activations. memory: for its data."""
        if depth < k or depth % 16:
            raise ValueError(f"a depth of {depth} for {k} columns")
        tiles = rounded(channels, 32) // 16
        data = np.empty(cls.size_of(channels, depth), dtype=np.uint8) if memory is None else memory
        scale = np.empty(tiles * 16, dtype=np.float32)
        zero = np.empty(tiles * 16, dtype=np.int32)
        biases = np.zeros(tiles * 16, dtype=np.float32) if bias else None
        return cls(data, scale, zero, biases, channels, k, tiles, depth)

    @classmethod
    def of(cls, weight: FloatArray, bias: FloatArray | None, depth: int) -> Self:
        """Quantizes a matrix; `depth` is the width of the activations."""
        channels, k = weight.shape
        matrix = cls.empty(channels, k, depth, bias=bias is not None)
        if matrix.bias is not None and bias is not None:
            matrix.bias[: len(bias)] = bias
        pack_all([(matrix, DenseRows(weight))])
        return matrix

    @staticmethod
    def size_of(channels: int, depth: int) -> int:
        """Bytes of the data of a matrix."""
        return rounded(channels, 32) * depth

    def pack(self, rows: MatrixRows, first: int, last: int) -> None:
        """Quantizes the rows of tiles `first` to `last - 1`; threads may pack different tiles."""
        weight = rows.floats(first * 16, min(last * 16, self.channels))
        weight = np.ascontiguousarray(weight, dtype=np.float32)
        scratch = np.empty(18 * self.depth, dtype=np.float32)
        native.library().outstride_pack(
            weight.ctypes.data,
            len(weight),
            self.k,
            last - first,
            self.depth,
            HadamardRotation.of(self.depth).pointer,
            scratch.ctypes.data,
            self.data[first * 16 * self.depth :].ctypes.data,
            self.scale[first * 16 :].ctypes.data,
            self.zero[first * 16 :].ctypes.data,
        )

    def move(self, memory: npt.NDArray[np.uint8]) -> None:
        """Moves the weights to other memory."""
        memory[:] = self.data
        self.data = memory
        self.struct.data = memory.ctypes.data

    @property
    def stride(self) -> int:
        """The width of a row of outputs."""
        return self.tiles * 16

    def rows(self, ids: IntArray, width: int, out: FloatArray | None = None) -> FloatArray:
        """Rows as float32 [ids, width]; `out`, if given, must be zeros."""
        listed = ids.tolist()
        if listed and not (min(listed) >= 0 and max(listed) < self.channels):
            raise ValueError("a row outside the matrix")
        ids = np.ascontiguousarray(ids, dtype=np.int64)
        if out is None:
            out = np.zeros((len(listed), width), dtype=np.float32)
        scratch = np.empty(self.depth, dtype=np.float32)
        native.library().outstride_rows(
            self.pointer, address(ids), len(listed), self.k, width, address(scratch), address(out)
        )
        return out


def alternating(weight: FloatArray) -> FloatArray:
    """Gate and up channels, concatenated, in the order of the kernels: a copy."""
    order = alternating_rows(len(weight) // 2)
    found = weight[order]
    found[order < 0] = 0
    return found
