"""Weights as the kernels read them, and how their products are laid out over the card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

STEP = 64
"""Columns of K that a program takes at a time; K is padded to whole steps. A weight is stored in
squares of so many rows and columns, each in one piece, so that a program reads its memory in order."""
SMALL = 4 << 20
"""Matrices below so many elements are latency, not bandwidth: they are never split."""
LANES = 1024
"""So many sums of squares a row has at the most."""
BUSY = 96
"""So many programs with deep pipelines keep the memory of a card busy; more parts of K than that
takes cost more than they bring."""
FULL = 180
"""So many programs keep the processors of a card busy."""


def up(value: int, unit: int) -> int:
    """Rounded up to whole units."""
    return -(-value // unit) * unit


def parts(outer: int, inner: int) -> int:
    """Into how many parts K is cut, for a weight of this shape. Part of every result's bits."""
    if outer * inner < SMALL:
        return 1
    split = 1
    while split < 8 and -(-outer // 64) * split < BUSY and inner // STEP % (split * 2) == 0:
        split *= 2
    return split


def chains_of(inner: int) -> int:
    """Into how many chains the sums of a small matrix fall. Part of every result's bits."""
    return next(count for count in (4, 3, 2, 1) if inner // STEP % count == 0)


def grain(width: int) -> int:
    """Over so many columns squares are summed before a norm. Part of every result's bits."""
    size = 16
    while size < STEP and width > size * STEP:
        size *= 2
    return size


def lanes(width: int) -> int:
    """For how many such sums a row has room: a power of two."""
    return 1 << max(-(-width // grain(width)) - 1, 1).bit_length()


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a product is laid out for a number of rows; no bit depends on it."""

    bm: int
    bn: int
    fan: bool
    warps: int
    stages: int
    step: int = STEP
    lines: int = 64
    """How much of each column is asked for before the input is there, in units of 64 elements."""
    late: bool = False
    """Whether the next kernel may start only when this one is nearly done."""
    bulk: bool = False
    """Whether whole squares are fetched by the copy engine of a card that has one."""


def tiles(outer: int, inner: int, rows: int, *, least: int = 16) -> Tiles:
    """Tiles for a weight of this shape. `rows` is a multiple of 16; `least` columns stay together."""
    if outer * inner < SMALL:
        if rows > 128:
            return Tiles(64 if rows % 64 == 0 else 16, max(64, least), False, 4, 2)
        bm = min(rows, 64)
        bn = max(32 if outer >= 2048 else 16, least)
        if bm == 16:
            return Tiles(bm, bn, False, 2, 3, 2 * STEP)
        if bn <= 32 and rows == 32:
            return Tiles(16, bn, False, 1, 3)
        return Tiles(bm, bn, False, 4, 3)
    if rows <= 64:
        bm = rows if rows in (16, 32, 64) else 16
        if outer < 16384 and least <= 64:
            stages = 6 if bm == 16 and parts(outer, inner) > 1 else 9
            return Tiles(bm, 64, True, 4, stages, lines=0, late=True)
        if outer < 65536 and least <= 128:
            return Tiles(bm, 128, True, 4, 6 if bm == 64 else 3, lines=0, late=True, bulk=True)
        return Tiles(bm, max(128, least), True, 8 if bm == 64 else 4, 4, lines=0, late=True)
    bm = 128 if rows % 128 == 0 else 64 if rows % 64 == 0 else 16
    many = rows // bm * -(-outer // 128)
    warps, bulk = 8 if bm >= 64 else 4, least <= 128
    return Tiles(bm, max(128, least), many < FULL, warps, 5, lines=0, late=True, bulk=bulk)


@dataclass(slots=True)
class Matrix:
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
    ) -> Matrix:
        """Takes a matrix over; a norm's weight becomes part of it. Rounded once."""
        outer, inner = weight.shape
        split = parts(outer, up(inner, STEP))
        moved = weight.to(device)
        if norm is not None:
            moved = moved.float() * norm.to(device, torch.float32)
        tall, wide = up(outer, 256), up(inner, STEP)
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
        """What tells the copy engine where tiles of x and of the weight are."""
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
class Scratch:
    """Room for partial results; kernels of one stream share it."""

    device: torch.device
    partial: torch.Tensor
    tickets: torch.Tensor
    sums: torch.Tensor
    """Of squares: of groups of columns, row by row."""
    nothing: torch.Tensor

    @classmethod
    def make(cls, device: torch.device, rows: int) -> Scratch:
        def room(count: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        return cls(
            device,
            room(24 << 20, torch.float32),
            room(1 << 16, torch.int32),
            room(rows * LANES, torch.float32),
            room(1, torch.float32),
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """What queries, keys and values need besides their product."""

    positions: torch.Tensor
    slots: torch.Tensor
    cosines: torch.Tensor
    sines: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    heads: int
    kv_heads: int
    head: int
    wide: int
    rope: bool
