"""Weights as the kernels read them, and how their products are laid out over the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

STEP = 64
"""Columns of K that a program takes at a time; K is padded to whole steps. A weight is stored in
squares of STEP rows and columns, each contiguous, so that a program reads memory in order."""
SMALL = 4 << 20
"""Matrices with fewer elements are bound by latency, not bandwidth: they are never split."""
MAX_NORM_GROUPS = 1024
"""How many sums of squares a row has at most."""
MEMORY_PROGRAMS = 96
"""How many programs with deep pipelines keep the memory of a GPU busy; splitting K further costs more
than it gains."""
COMPUTE_PROGRAMS = 180
"""How many programs keep the multiprocessors of a GPU busy."""


def round_up(value: int, unit: int) -> int:
    """Rounded up to whole units."""
    return -(-value // unit) * unit


def num_splits(outer: int, inner: int) -> int:
    """Into how many parts K is split, for a weight of this shape. Results depend on it, bit for bit."""
    if outer * inner < SMALL:
        return 1
    split = 1
    while (
        split < 8 and -(-outer // 64) * split < MEMORY_PROGRAMS and inner // STEP % (split * 2) == 0
    ):
        split *= 2
    return split


def num_chains(inner: int) -> int:
    """How many chains the sums of a small matrix form. Results depend on it, bit for bit."""
    return next(count for count in (4, 3, 2, 1) if inner // STEP % count == 0)


def norm_group(width: int) -> int:
    """Over how many columns squares are summed before a norm. Results depend on it, bit for bit."""
    size = 16
    while size < STEP and width > size * STEP:
        size *= 2
    return size


def norm_groups(width: int) -> int:
    """How many such sums a row has, rounded up to a power of two."""
    return 1 << max(-(-width // norm_group(width)) - 1, 1).bit_length()


@dataclass(frozen=True, slots=True)
class LinearTiles:
    """How a product is laid out for a number of rows; no bit depends on it."""

    bm: int
    bn: int
    """Rows and columns of a tile of results."""
    fan: bool
    """Whether each part of K has a program of its own."""
    warps: int
    stages: int
    step: int = STEP
    lines: int = 64
    """How much of each column is prefetched before the input is there, in units of 64 elements."""
    late: bool = False
    """Whether the next kernel may start only when this one is nearly done."""
    bulk: bool = False
    """Whether whole squares are fetched by the tensor memory accelerator, where there is one."""


def tiles_for(outer: int, inner: int, rows: int, *, min_columns: int = 16) -> LinearTiles:
    """Tiles for a weight of this shape. `rows` is a multiple of 16; `min_columns` stay together."""
    if outer * inner < SMALL:
        if rows > 128:
            return LinearTiles(64 if rows % 64 == 0 else 16, max(64, min_columns), False, 4, 2)
        bm = min(rows, 64)
        bn = max(32 if outer >= 2048 else 16, min_columns)
        if bm == 16:
            return LinearTiles(bm, bn, False, 2, 3, 2 * STEP)
        if bn <= 32 and rows == 32:
            return LinearTiles(16, bn, False, 1, 3)
        return LinearTiles(bm, bn, False, 4, 3)
    if rows <= 64:
        bm = rows if rows in (16, 32, 64) else 16
        if outer < 16384 and min_columns <= 64:
            stages = 6 if bm == 16 and num_splits(outer, inner) > 1 else 9
            return LinearTiles(bm, 64, True, 4, stages, lines=0, late=True)
        if outer < 65536 and min_columns <= 128:
            return LinearTiles(
                bm, 128, True, 4, 6 if bm == 64 else 3, lines=0, late=True, bulk=True
            )
        return LinearTiles(
            bm, max(128, min_columns), True, 8 if bm == 64 else 4, 4, lines=0, late=True
        )
    bm = 128 if rows % 128 == 0 else 64 if rows % 64 == 0 else 16
    many = rows // bm * -(-outer // 128)
    warps, bulk = 8 if bm >= 64 else 4, min_columns <= 128
    return LinearTiles(
        bm, max(128, min_columns), many < COMPUTE_PROGRAMS, warps, 5, lines=0, late=True, bulk=bulk
    )


@dataclass(slots=True)
class PackedMatrix:
    """A weight as the kernels read it: [outer, inner], both padded with zeros, in squares."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    outer: int
    inner: int
    """The size before padding; the norm divides by the width."""
    split: int

    @classmethod
    def pack(
        cls,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm: torch.Tensor | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> PackedMatrix:
        """Takes a matrix over; a norm's weight becomes part of it. Rounded once."""
        outer, inner = weight.shape
        split = num_splits(outer, round_up(inner, STEP))
        moved = weight.to(device)
        if norm is not None:
            moved = moved.float() * norm.to(device, torch.float32)
        tall, wide = round_up(outer, 256), round_up(inner, STEP)
        if (tall, wide) == (outer, inner):
            packed = moved.to(dtype).contiguous()
        else:
            packed = torch.zeros(tall, wide, dtype=dtype, device=device)
            packed[:outer, :inner] = moved.to(dtype)
        if bias is not None:
            padded = torch.zeros(tall, dtype=torch.float32, device=device)
            padded[:outer] = bias.to(device)
            bias = padded
        squares = packed.unflatten(0, (-1, STEP)).unflatten(2, (-1, STEP)).transpose(1, 2)
        return cls(squares.contiguous().view(tall, wide), bias, outer, inner, split)

    def bulk(self, x: torch.Tensor, rows: int, columns: int) -> tuple[Any, Any]:
        """Tensor descriptors of x and of the weight, for tiles of `rows` and `columns`."""
        from triton.tools.tensor_descriptor import (  # type: ignore[import-not-found,unused-ignore]
            TensorDescriptor,
        )

        squares = self.weight.view(-1, self.weight.shape[1], STEP)
        box = [columns // STEP, STEP, STEP]
        return (
            TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, STEP]),
            TensorDescriptor(squares, list(squares.shape), list(squares.stride()), box),
        )


@dataclass(slots=True)
class LinearScratch:
    """Buffers for partial results; kernels of one stream share them."""

    device: torch.device
    partial: torch.Tensor
    counters: torch.Tensor
    """How many programs of a tile are done."""
    sums: torch.Tensor
    """Of squares: [rows, groups of columns]."""
    none: torch.Tensor
    """Stands for arguments that a kernel does not use."""

    @classmethod
    def make(cls, device: torch.device, rows: int) -> LinearScratch:
        def zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        return cls(
            device,
            zeros(24 << 20, torch.float32),
            zeros(1 << 16, torch.int32),
            zeros(rows * MAX_NORM_GROUPS, torch.float32),
            zeros(1, torch.float32),
        )


@dataclass(frozen=True, slots=True)
class QkvOutput:
    """What the product for queries, keys and values needs: RoPE, head norms, and the KV cache."""

    positions: torch.Tensor
    """[rows], like slots."""
    slots: torch.Tensor
    cos: torch.Tensor
    """[positions, head_dim / 2], like sin."""
    sin: torch.Tensor
    keys: torch.Tensor
    """[slots, kv_heads, head_width], like values."""
    values: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    heads: int
    kv_heads: int
    head_dim: int
    head_width: int
    """Padded."""
    rope: bool
    """Whether this layer has RoPE."""
