"""int4 weights: groups of 32 along a row, each with a scale and a minimum.

A weight is `minimum + code * scale`. Q4_1 files store exactly that. Their groups are reproduced
exactly, because scale and minimum follow from the smallest and largest value of a group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from outstride.core.graph import FloatArray
from outstride.ops.cpu import native
from outstride.ops.cpu.int8 import rounded
from outstride.ops.matrix_rows import BLOCK_KINDS, DenseRows, MatrixRows, pack_all
from outstride.ops.weights import LayerWeights

GROUP = 32
_BLOCK = 64 + 16 * GROUP // 2
"""Bytes of one group in a tile of sixteen channels: scales, minima, two codes in a byte."""
SPREAD = 4
"""Floats of memory for each column of a tile whose codes are spread out to a byte each; there is
one more group of them, so that groups can go in pairs."""
_SPANS = (14.0, 13.0, 12.0, 11.0, 10.0, 9.0, 8.0, 7.0, 15.6, 16.3, 17.0, 18.0, 19.0)
"""Candidate numbers of steps between the ends of a group, besides 15: grids that are not fully used,
and steps so small that the ends are clipped."""
_TOO_LARGE = "weights beyond 65,504 do not fit into int4 groups"

Bytes: TypeAlias = npt.NDArray[np.uint8]
Halves: TypeAlias = npt.NDArray[np.float16]


@dataclass(slots=True)
class _Grids:
    """Quantized groups; `error` is the squared error of each."""

    codes: Bytes
    scale: Halves
    minimum: Halves
    error: FloatArray

    @classmethod
    def of(cls, groups: FloatArray, scale: FloatArray, minimum: FloatArray) -> _Grids:
        """The nearest codes on grids whose scale and minimum are rounded to 16 bits."""
        with np.errstate(over="ignore"):
            s, m = scale.astype(np.float16), minimum.astype(np.float16)
        if not (np.isfinite(s).all() and np.isfinite(m).all()):
            raise ValueError(_TOO_LARGE)
        steps = np.where(s > 0, s, 1).astype(np.float32)[:, None]
        codes = np.rint(((groups - m.astype(np.float32)[:, None]) / steps).clip(0, 15))
        back = s.astype(np.float32)[:, None] * codes + m.astype(np.float32)[:, None]
        error = _tree_sum(np.square(back - groups))
        return cls(codes.astype(np.uint8), s, m, error)

    def fitted(self, groups: FloatArray) -> _Grids:
        """The least-squares scale and minimum of these codes, and the nearest codes on that grid."""
        codes = self.codes.astype(np.float32)
        size = np.float32(GROUP)
        mean_code, mean = _tree_sum(codes) / size, _tree_sum(groups) / size
        off: FloatArray = codes - mean_code[:, None]
        spread = _tree_sum(np.square(off))
        spread[spread == 0] = 1
        scale: FloatArray = _tree_sum(off * groups) / spread
        return _Grids.of(groups, scale, mean - scale * mean_code)

    def take(self, other: _Grids, better: npt.NDArray[np.bool_]) -> None:
        for name in ("codes", "scale", "minimum", "error"):
            getattr(self, name)[better] = getattr(other, name)[better]


def _tree_sum(values: FloatArray) -> FloatArray:
    """Sums of 32 columns, over the tree of `sum` in kernels.inc: halves, quarters, eighths."""
    for width in (16, 8, 4, 2, 1):
        values = values[:, :width] + values[:, width:]
    return values[:, 0].copy()


def _nearest(groups: FloatArray) -> _Grids:
    """A grid from the smallest to the largest value of each group, or the best of some others.

    `nearest_group` in kernels.pack.inc computes the same bits; this one is for machines without
    native kernels.
    """
    low, high = groups.min(axis=1) + np.float32(0), groups.max(axis=1)  # never -0
    found = _Grids.of(groups, (high - low) / 15, low)
    rest = np.flatnonzero(found.error > 0)
    if len(rest):
        groups, low, high = groups[rest], low[rest], high[rest]
        best = _Grids(*(getattr(found, n)[rest] for n in ("codes", "scale", "minimum", "error")))
        for span in _SPANS:
            scale = (high - low) / np.float32(span)
            start = low if span < 15 else (low + high) / 2 - np.float32(7.5) * scale
            other = _Grids.of(groups, scale, start)
            best.take(other, other.error < best.error)
        other = best.fitted(groups)
        best.take(other, other.error < best.error)
        for name in ("codes", "scale", "minimum", "error"):
            getattr(found, name)[rest] = getattr(best, name)
    return found


@dataclass(slots=True)
class Int4Matrix:
    """An int4 matrix [channels, k] in groups of 32, in the layout of the kernels.

    data: for each tile of 16 channels and each group: 16 scales and 16 minima in half
    precision, then four times 64 bytes. Those hold, channel by channel, four codes of the group's
    first half in their low bits and four of its second half in their high bits.
    """

    data: Bytes
    bias: FloatArray | None
    channels: int
    k: int
    tiles: int
    depth: int
    struct: native.MatrixStruct = field(init=False)

    def __post_init__(self) -> None:
        if self.depth % GROUP or self.data.size != self.tiles * (self.depth // GROUP) * _BLOCK:
            raise ValueError("int4 weights of the wrong size")
        self.struct = native.MatrixStruct(
            self.data.ctypes.data,
            None,
            None,
            None if self.bias is None else self.bias.ctypes.data,
            None,
            self.tiles,
            self.depth,
            4,
        )

    @classmethod
    def empty(
        cls, channels: int, k: int, depth: int, *, bias: bool = False, memory: Bytes | None = None
    ) -> Self:
        """A matrix to be filled; `depth` is the width of the activations. memory: for its data."""
        if depth < k or depth % GROUP:
            raise ValueError(f"a depth of {depth} for {k} columns in groups of {GROUP}")
        tiles = rounded(channels, 32) // 16
        data = np.empty(cls.size_of(channels, depth), dtype=np.uint8) if memory is None else memory
        biases = np.zeros(tiles * 16, dtype=np.float32) if bias else None
        return cls(data, biases, channels, k, tiles, depth)

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
        return rounded(channels, 32) // 16 * (depth // GROUP) * _BLOCK

    def pack(self, rows: MatrixRows, first: int, last: int) -> None:
        """Fills tiles `first` to `last - 1`; threads may fill different tiles.

        4-bit blocks of a file are taken as they are. Other rows are quantized, and so are blocks whose
        scale or minimum is no finite number in half precision: reading them says what is wrong.
        """
        start, stop = first * 16, min(last * 16, self.channels)
        tile = self.depth // GROUP * _BLOCK
        data = self.data[first * tile : last * tile]
        kind = rows.block_kind
        made = rows.blocks(start, stop) if kind is None and native.library_path() else None
        if (kind is not None or made is not None) and native.library_path() is not None:
            addresses = np.zeros((last - first) * 16, dtype=np.uint64)
            if made is None:
                addresses[: max(stop - start, 0)] = rows.addresses(start, stop)
            else:
                kind, each = "Q4_1", np.arange(len(made), dtype=np.uint64)
                addresses[: len(made)] = made.ctypes.data + each * made.shape[1]
            number, groups = BLOCK_KINDS.index(kind or ""), self.k // GROUP
            if not native.library().outstride_repack_int4(
                addresses.ctypes.data, number, groups, last - first, self.depth, data.ctypes.data
            ):
                return
        self._quantize(np.ascontiguousarray(rows.floats(start, stop), dtype=np.float32), data)

    def _quantize(self, weight: FloatArray, data: Bytes) -> None:
        """Quantizes rows into whole tiles."""
        tiles, count = data.size // (self.depth // GROUP * _BLOCK), self.depth // GROUP
        if native.library_path() is None:
            padded = np.zeros((tiles * 16, self.depth), dtype=np.float32)
            padded[: len(weight), : self.k] = weight
            if self.k % GROUP:  # padding meets zero activations: any value of the group will do
                padded[: len(weight), self.k : rounded(self.k, GROUP)] = weight[:, -1:]
            _lay(_nearest(padded.reshape(-1, GROUP)), data.reshape(tiles, count, _BLOCK))
            return
        scratch = np.empty(self.depth, dtype=np.float32)
        if native.library().outstride_pack_int4(
            weight.ctypes.data,
            len(weight),
            self.k,
            tiles,
            self.depth,
            scratch.ctypes.data,
            data.ctypes.data,
        ):
            raise ValueError(_TOO_LARGE)

    def dense(self) -> FloatArray:
        """The weights that the kernels work with, in float32."""
        blocks = self.data.reshape(self.tiles, -1, _BLOCK)
        ends = np.ascontiguousarray(blocks[..., :64]).view(np.float16).astype(np.float32)
        ends = ends.reshape(*blocks.shape[:2], 2, 16).transpose(2, 0, 3, 1)[..., None]
        pairs = blocks[..., 64:].reshape(*blocks.shape[:2], 4, 16, 4).transpose(0, 3, 1, 2, 4)
        codes = np.stack([pairs & 15, pairs >> 4], axis=3)  # [tiles, 16, groups, 2, 4, 4]
        codes = codes.reshape(self.tiles, 16, -1, GROUP).astype(np.float32)
        whole = ends[0] * codes + ends[1]
        return np.ascontiguousarray(whole.reshape(self.stride, -1)[: self.channels, : self.k])

    def move(self, memory: Bytes) -> None:
        """Moves the weights to other memory."""
        memory[:] = self.data
        self.data = memory
        self.struct.data = memory.ctypes.data

    @property
    def stride(self) -> int:
        """The width of a row of outputs."""
        return self.tiles * 16


def quantize_layer(layer: LayerWeights) -> None:
    """Quantizes a layer's matrices and replaces them by the dequantized values, in place."""
    matrices = [layer.qkv, layer.output, layer.gate_up, layer.down]
    if layer.experts is not None:
        matrices += [*layer.experts.gate_up, *layer.experts.down]
    for matrix in matrices:
        if len(matrix):
            grouped = Int4Matrix.of(matrix.numpy(), None, rounded(matrix.shape[1], GROUP))
            matrix.copy_(torch.from_numpy(grouped.dense()))


def _lay(grids: _Grids, data: Bytes) -> None:
    """Groups, channel by channel, into the blocks of their tiles."""
    tiles, count, _ = data.shape
    ends = np.stack([grids.scale, grids.minimum]).reshape(2, tiles, 16, count)
    data[..., :64] = (
        np.ascontiguousarray(ends.transpose(1, 3, 0, 2)).view(np.uint8).reshape(tiles, count, 64)
    )
    codes = grids.codes.reshape(tiles, 16, count, 2, 4, 4)
    pairs = codes[:, :, :, 0] | codes[:, :, :, 1] << 4  # [tiles, 16, groups, 4, 4]
    data[..., 64:] = pairs.transpose(0, 2, 3, 1, 4).reshape(tiles, count, -1)
