"""Matrices whose rows are read while they are packed, so that a model is never in memory in float32."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from outstride.core.graph import FloatArray, IntArray

BLOCK_KINDS = ("Q4_0", "Q4_1", "Q4_K")
"""Types of GGUF blocks whose 4-bit codes are repacked to int4 as they are."""
DEQUANTIZED_KINDS = (*BLOCK_KINDS, "Q6_K", "Q8_0")
"""Types of GGUF blocks that native code reads, in the order of the constants in kernels.pack.inc."""
_PORTION, _REPACKED_PORTION = 1 << 18, 1 << 21
"""About how many weights one task packs: so few that float32 rows stay in the processor's cache; more
where 4-bit codes are taken as they are."""

Progress: TypeAlias = Callable[[int], None]
"""Is called with a number of weights that have been packed."""


class MatrixRows(Protocol):
    """A matrix [channels, k], in memory or in a model file."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def block_kind(self) -> str | None:
        """The type of its 4-bit blocks, one of `BLOCK_KINDS`; None: it has none."""

    @property
    def stored_bits(self) -> float | None:
        """Bits of a weight in the model file, where it is quantized; the most of all parts."""

    def floats(self, start: int, stop: int) -> FloatArray:
        """Rows `start` to `stop - 1` in float32."""

    def addresses(self, start: int, stop: int) -> npt.NDArray[np.uint64]:
        """Where the 4-bit blocks of these rows are in memory; 0 for rows of zeros."""

    def blocks(self, start: int, stop: int) -> npt.NDArray[np.uint8] | None:
        """4-bit codes of these rows as blocks of Q4_1, made for this call; None: there are none."""


class Packing(Protocol):
    """A packed matrix that is filled tile by tile; tiles have sixteen channels."""

    @property
    def tiles(self) -> int: ...

    @property
    def depth(self) -> int: ...

    def pack(self, rows: MatrixRows, first: int, last: int) -> None:
        """Packs tiles `first` to `last - 1`."""


@dataclass(frozen=True, slots=True)
class DenseRows:
    """A matrix in memory. order: the row of each channel, -1 for zeros; None: as they are."""

    weight: FloatArray
    order: IntArray | None = None
    block_kind: str | None = None
    stored_bits: float | None = None

    @property
    def shape(self) -> tuple[int, int]:
        channels = len(self.weight) if self.order is None else len(self.order)
        return channels, self.weight.shape[1]

    def floats(self, start: int, stop: int) -> FloatArray:
        if self.order is None:
            return self.weight[start:stop]
        order = self.order[start:stop]
        found = self.weight[order]
        found[order < 0] = 0
        return found

    def addresses(self, start: int, stop: int) -> npt.NDArray[np.uint64]:
        raise NotImplementedError("float32 weights have no 4-bit blocks")

    def blocks(self, start: int, stop: int) -> npt.NDArray[np.uint8] | None:
        del start, stop
        return None


@dataclass(frozen=True, slots=True)
class LayerRows:
    """The weights of one layer, matrices unread. Gate and up channels alternate (`alternating_rows`).

    vectors: norms, and routers of experts [experts, hidden]; biases: by the name of their matrix.
    Names of the weights of experts begin with "experts.".
    """

    matrices: Mapping[str, MatrixRows]
    vectors: Mapping[str, FloatArray]
    biases: Mapping[str, FloatArray] = field(default_factory=dict)

    @property
    def optional(self) -> set[str]:
        """Names of the arrays that another layer may lack."""
        return {*self.vectors, *(f"{name}.bias" for name in self.biases)}


@dataclass(frozen=True, slots=True)
class ModelRows:
    """The weights of a model, matrices unread.

    optional: the arrays `LayerRows.optional` of all layers. head: None for tied embeddings.
    """

    layers: Iterable[LayerRows]
    optional: set[str]
    embedding: MatrixRows
    norm: FloatArray
    head: MatrixRows | None = None


def alternating_rows(inner: int) -> IntArray:
    """The rows of gate and up, concatenated, in the order of the kernels: in turns of sixteen.

    Both are padded to whole tiles; -1 stands for a row of zeros.
    """
    padded = -(-inner // 16) * 16
    each = np.arange(padded)
    each[inner:] = -1
    up = np.where(each < 0, -1, each + inner)
    return np.stack([each.reshape(-1, 16), up.reshape(-1, 16)], axis=1).reshape(-1)


def stacked_rows(order: IntArray, count: int, rows: int) -> IntArray:
    """The rows of `count` matrices of `rows` rows, concatenated, each of them in this order."""
    each = np.arange(count)[:, None] * rows + order
    return np.where(order < 0, -1, each).reshape(-1)


@cache
def expert_rows(count: int, inner: int, hidden: int) -> tuple[IntArray, IntArray]:
    """The rows of the matrices of all experts of a layer in the order of the kernels.

    Gate and up of an expert, concatenated, alternate; down is padded to whole pairs of tiles. The
    arrays are shared by all layers: nobody may change them.
    """
    padded = np.arange(-(-hidden // 32) * 32)
    padded[hidden:] = -1
    gate_up = stacked_rows(alternating_rows(inner), count, 2 * inner)
    return gate_up, stacked_rows(padded, count, hidden)


def workers() -> int:
    """As many threads as there are cores that this process may use."""
    return max(1, len(os.sched_getaffinity(0)))


def pack_all(
    matrices: Sequence[tuple[Packing, MatrixRows]], progress: Progress | None = None
) -> None:
    """Packs matrices on all cores, some tiles at a time."""
    tasks = []
    for matrix, rows in matrices:
        portion = _PORTION if rows.block_kind is None else _REPACKED_PORTION
        step = max(1, portion // (16 * matrix.depth))
        for first in range(0, matrix.tiles, step):
            tasks.append((matrix, rows, first, min(first + step, matrix.tiles)))

    def run(task: tuple[Packing, MatrixRows, int, int]) -> None:
        matrix, rows, first, last = task
        matrix.pack(rows, first, last)
        if progress is not None:
            progress((last - first) * 16 * matrix.depth)

    if len(tasks) < 2 or workers() == 1:
        for task in tasks:
            run(task)
        return
    with ThreadPoolExecutor(min(workers(), len(tasks))) as pool:
        for _ in pool.map(run, tasks):
            pass
