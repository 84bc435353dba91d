"""int8 weights: tiles of sixteen channels, with a scale and a zero point per channel.

Weights and activations are Hadamard-rotated before they are quantized.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from outstride.core.graph import FloatArray, IntArray
from outstride.core.host_library import address
from outstride.ops.cpu import native
from outstride.ops.cpu.hadamard import HadamardRotation


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
    def of(cls, weight: FloatArray, bias: FloatArray | None, depth: int) -> Int8Matrix:
        """Quantizes a matrix; `depth` is the width of the activations."""
        channels, k = weight.shape
        if depth < k or depth % 16:
            raise ValueError(f"a depth of {depth} for {k} columns")
        weight = np.ascontiguousarray(weight, dtype=np.float32)
        tiles = rounded(channels, 32) // 16
        data = np.empty(tiles * depth * 16, dtype=np.uint8)
        scale = np.empty(tiles * 16, dtype=np.float32)
        zero = np.empty(tiles * 16, dtype=np.int32)
        scratch = np.empty(2 * depth, dtype=np.float32)
        native.library().outstride_pack(
            weight.ctypes.data,
            channels,
            k,
            tiles,
            depth,
            HadamardRotation.of(depth).pointer,
            scratch.ctypes.data,
            data.ctypes.data,
            scale.ctypes.data,
            zero.ctypes.data,
        )
        if bias is not None:
            bias = np.concatenate([bias, np.zeros(tiles * 16 - channels)]).astype(np.float32)
        return cls(data, scale, zero, bias, channels, k, tiles, depth)

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
    """Gate and up channels interleaved in groups of sixteen, as the kernels need them."""
    gate, up = np.split(weight, 2)
    size = rounded(len(gate), 16)
    interleaved = np.zeros((size // 16, 2, 16, *weight.shape[1:]), dtype=np.float32)
    for which, half in enumerate((gate, up)):
        padded = np.zeros((size, *weight.shape[1:]), dtype=np.float32)
        padded[: len(half)] = half
        interleaved[:, which] = padded.reshape(size // 16, 16, *weight.shape[1:])
    return interleaved.reshape(2 * size, *weight.shape[1:])
