# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""Matrix products whose sums run in an order that the weight's shape alone fixes.

K is cut into `split` equal parts, a number that follows from the shape of the weight. Within a part
the tensor cores add steps of 16 one after the other; parts are added in order. How many rows stand
in a tile, and whether the parts are summed by one program or by several, changes no bit: few rows
spread the parts over the card, many rows take them one after the other.

Small matrices cost latency, not bandwidth, and take another way: eight warps of one program each sum
an eighth of K, and the eighths are added in one fixed pattern.

The norm before a product is folded into it: its weight is part of the matrix, and its factor, one
number per row, is applied to the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from triton.language.extra.cuda import (  # type: ignore[import-not-found,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)

STEP = 64
"""Columns of K that a program takes at a time; K is padded to whole steps."""

FLOATS = tl.constexpr(0)
"""The result in float32."""
GATED = tl.constexpr(1)
"""Columns are pairs of gate and up: silu(gate) * up in the format of the activations."""
ADDED = tl.constexpr(2)
"""Added to the residual stream, in float32 and in the format of the activations."""
HEADS = tl.constexpr(3)
"""Queries, keys and values: head norms, rotation, and the entries of the cache."""

UNSCALED = tl.constexpr(0)
NORMED = tl.constexpr(1)
"""The norm's factor is worked out along the way."""
KNOWN = tl.constexpr(2)
"""The norm's factor is read."""


@triton.jit
def pair_sum(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr):
    """[ROWS, WIDTH] -> [ROWS]: neighbours are added, then neighbouring sums, whatever the layout."""
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (ROWS, WIDTH >> (level + 1), 2)), axis=2)
    return tl.reshape(x, (ROWS,))


@triton.jit
def _finish(y, base, rows, cols, bias, out, low, ld_out, positions, slots, cosines, sines, keys,
            values, query_norm, key_norm, eps,
            BM: tl.constexpr, BN: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
            Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr,
            WIDE: tl.constexpr, LEVELS: tl.constexpr, ROPE: tl.constexpr,
            HEAD_NORM: tl.constexpr):  # fmt: skip
    """What becomes of a tile of results; `base` is what it is added to."""
    if BIAS:
        y += tl.load(bias + cols)[None, :]
    if KIND == FLOATS:
        tl.store(out + rows[:, None].to(tl.int64) * ld_out + cols[None, :], y)
    if KIND == ADDED:
        at = rows[:, None].to(tl.int64) * ld_out + cols[None, :]
        y += base
        tl.store(out + at, y)
        tl.store(low + at, y.to(low.dtype.element_ty))
    if KIND == GATED:
        gate, up = tl.split(tl.reshape(y, (BM, BN // 2, 2)))
        y = tl.math.div_rn(gate, 1.0 + tl.exp(-gate)) * up
        half = tl.max(tl.reshape(cols // 2, (BN // 2, 2)), axis=1)
        at = rows[:, None].to(tl.int64) * ld_out + half[None, :]
        tl.store(low + at, y.to(low.dtype.element_ty))
    if KIND == HEADS:
        even, odd = tl.split(tl.reshape(y, (BM, BN // 2, 2)))
        pair = tl.max(tl.reshape(cols // 2, (BN // 2, 2)), axis=1)
        head, place = pair // (WIDE // 2), pair % (WIDE // 2)
        turned = head < Q_HEADS + KV_HEADS
        inside = place < HEAD // 2
        at_even = tl.where(turned, place, 2 * place)
        at_odd = tl.where(turned, place + HEAD // 2, 2 * place + 1)
        if HEAD_NORM:
            per: tl.constexpr = BN // WIDE
            squares = tl.reshape(even * even + odd * odd, (BM * per, WIDE // 2))
            mean = pair_sum(squares, BM * per, WIDE // 2, LEVELS - 1) / HEAD
            factor = tl.reshape(tl.math.rsqrt(mean + eps), (BM, per, 1))
            factor = tl.broadcast_to(factor, (BM, per, WIDE // 2))
            factor = tl.reshape(factor, (BM, BN // 2))
            of_query = inside & (head < Q_HEADS)
            of_key = inside & turned & (head >= Q_HEADS)
            norm = tl.load(query_norm + at_even, mask=of_query, other=1.0)
            norm *= tl.load(key_norm + at_even, mask=of_key, other=1.0)
            even = tl.where(turned[None, :], even * factor * norm[None, :], even)
            norm = tl.load(query_norm + at_odd, mask=of_query, other=1.0)
            norm *= tl.load(key_norm + at_odd, mask=of_key, other=1.0)
            odd = tl.where(turned[None, :], odd * factor * norm[None, :], odd)
        if ROPE:
            position = tl.load(positions + rows).to(tl.int64)
            angle = position[:, None] * (HEAD // 2) + place[None, :]
            both = (turned & inside)[None, :] & (position >= 0)[:, None]
            cos = tl.load(cosines + angle, mask=both, other=1.0)
            sin = tl.load(sines + angle, mask=both, other=0.0)
            new = tl.where(turned[None, :], even * cos - odd * sin, even)
            odd = tl.where(turned[None, :], odd * cos + even * sin, odd)
            even = new
        lean = low.dtype.element_ty
        even, odd = even.to(lean), odd.to(lean)
        here = inside[None, :] & (rows >= 0)[:, None]
        is_query = here & (head < Q_HEADS)[None, :]
        at = rows[:, None].to(tl.int64) * (Q_HEADS * WIDE) + (head * WIDE)[None, :]
        tl.store(low + at + at_even[None, :], even, mask=is_query)
        tl.store(low + at + at_odd[None, :], odd, mask=is_query)
        slot = tl.load(slots + rows).to(tl.int64) * (KV_HEADS * WIDE)
        is_key = here & turned[None, :] & (head >= Q_HEADS)[None, :]
        at = slot[:, None] + ((head - Q_HEADS) * WIDE)[None, :]
        tl.store(keys + at + at_even[None, :], even, mask=is_key)
        tl.store(keys + at + at_odd[None, :], odd, mask=is_key)
        known = head < Q_HEADS + 2 * KV_HEADS
        is_value = here & known[None, :] & (head >= Q_HEADS + KV_HEADS)[None, :]
        at = slot[:, None] + ((head - Q_HEADS - KV_HEADS) * WIDE)[None, :]
        tl.store(values + at + at_even[None, :], even, mask=is_value)
        tl.store(values + at + at_odd[None, :], odd, mask=is_value)


@triton.jit
def short_kernel(
    x, w, bias, out, low, gather,
    positions, slots, cosines, sines, keys, values, query_norm, key_norm,
    tiles_m, ld_x, ld_out, k_all, width, eps,
    BM: tl.constexpr, BN: tl.constexpr, LANES: tl.constexpr, ITER: tl.constexpr,
    NORM: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, GATHER: tl.constexpr,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, WIDE: tl.constexpr,
    HEAD_LEVELS: tl.constexpr, ROPE: tl.constexpr, HEAD_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """For matrices that are latency, not bandwidth: eight warps take an eighth of K each."""
    tile = tl.program_id(0)
    rows = tile % tiles_m * BM + tl.arange(0, BM)
    cols = tile // tiles_m * BN + tl.arange(0, BN)
    k = (tl.arange(0, 8) * (LANES * ITER))[:, None] + tl.arange(0, LANES)[None, :]
    b = w + cols[None, None, :].to(tl.int64) * k_all + k[:, :, None]
    right = tl.load(b, mask=(k < k_all)[:, :, None], other=0.0)
    if PDL:
        gdc_wait()
    base = tl.zeros((BM, BN), dtype=tl.float32)
    if KIND == ADDED:
        base = tl.load(out + rows[:, None].to(tl.int64) * ld_out + cols[None, :])
    source = rows
    if GATHER:
        source = tl.load(gather + rows)
    a = x + source[None, :, None].to(tl.int64) * ld_x + k[:, None, :]
    left = tl.load(a, mask=(k < k_all)[:, None, :], other=0.0)
    y = tl.dot(left, right)
    if NORM == NORMED:
        wide = left.to(tl.float32)
        squares = wide * wide
    for i in tl.static_range(1, ITER):
        inside = k + i * LANES < k_all
        left = tl.load(a + i * LANES, mask=inside[:, None, :], other=0.0)
        right = tl.load(b + i * LANES, mask=inside[:, :, None], other=0.0)
        y = tl.dot(left, right, y)
        if NORM == NORMED:
            wide = left.to(tl.float32)
            squares += wide * wide
    if PDL:
        gdc_launch_dependents()
    y = tl.sum(y, axis=0)
    if NORM == NORMED:
        sums = pair_sum(tl.reshape(squares, (8 * BM, LANES)), 8 * BM, LANES, 7)
        total = pair_sum(tl.trans(tl.reshape(sums, (8, BM))), BM, 8, 3)
        y *= tl.math.rsqrt(total / width + eps)[:, None]
    _finish(y, base, rows, cols, bias, out, low, ld_out, positions, slots, cosines, sines, keys,
            values, query_norm, key_norm, eps, BM, BN, KIND, BIAS, Q_HEADS, KV_HEADS, HEAD, WIDE,
            HEAD_LEVELS, ROPE, HEAD_NORM)  # fmt: skip


@triton.jit
def _chain(a, b, steps, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
           STAGES: tl.constexpr):  # fmt: skip
    """One part of K."""
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in tl.range(0, steps, num_stages=STAGES):
        acc = tl.dot(tl.load(a), tl.load(b), acc)
        a += BK
        b += BK
    return acc


@triton.jit
def linear_kernel(
    x, w, bias, out, low, factors, gather, partial, tickets,
    positions, slots, cosines, sines, keys, values, query_norm, key_norm,
    tiles_m, ld_x, ld_out, part, eps,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    FAN: tl.constexpr, NORM: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
    GATHER: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr, WIDE: tl.constexpr, HEAD_LEVELS: tl.constexpr, ROPE: tl.constexpr,
    HEAD_NORM: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x @ w.T, and what follows it. `part` columns make a part of K; x and w have whole parts."""
    pid = tl.program_id(0)
    first = pid % SPLIT if FAN else 0
    tile = pid // SPLIT if FAN else pid
    rows = tile % tiles_m * BM + tl.arange(0, BM)
    cols = tile // tiles_m * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    k_all = part * SPLIT
    b = w + cols[None, :].to(tl.int64) * k_all + (first * part + ks)[:, None]
    if PDL:
        gdc_wait()
    source = rows
    if GATHER:
        source = tl.load(gather + rows)
    a = x + source[:, None].to(tl.int64) * ld_x + (first * part + ks)[None, :]
    y = _chain(a, b, part // BK, BM, BN, BK, STAGES)
    if PDL:
        gdc_launch_dependents()
    last = True
    if SPLIT > 1:
        if FAN:
            at = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
            tl.store(partial + (tile * SPLIT + first) * (BM * BN) + at, y)
            tl.debug_barrier()
            last = tl.atomic_add(tickets + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
            if last:
                mine = partial + tile * SPLIT * (BM * BN) + at
                y = tl.load(mine, cache_modifier=".cg")
                for s in tl.static_range(1, SPLIT):
                    y += tl.load(mine + s * (BM * BN), cache_modifier=".cg")
                tl.store(tickets + tile, 0)
        else:
            for s in range(1, SPLIT):
                y += _chain(a + s * part, b + s * part, part // BK, BM, BN, BK, STAGES)
    if last:
        if NORM == KNOWN:
            y *= tl.load(factors + rows)[:, None]
        base = tl.zeros((BM, BN), dtype=tl.float32)
        if KIND == ADDED:
            base = tl.load(out + rows[:, None].to(tl.int64) * ld_out + cols[None, :])
        _finish(y, base, rows, cols, bias, out, low, ld_out, positions, slots, cosines, sines,
                keys, values, query_norm, key_norm, eps, BM, BN, KIND, BIAS, Q_HEADS, KV_HEADS,
                HEAD, WIDE, HEAD_LEVELS, ROPE, HEAD_NORM)  # fmt: skip


@triton.jit
def factor_kernel(x, factors, gather, ld_x, width, eps, WIDTH: tl.constexpr,
                  GATHER: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """The factor of the norm: one program adds up one row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    source = tl.load(gather + row) if GATHER else row
    k = tl.arange(0, WIDTH)
    values = tl.load(x + source.to(tl.int64) * ld_x + k, mask=k < width, other=0.0).to(tl.float32)
    total = tl.sum(values * values, axis=0)
    tl.store(factors + row, tl.math.rsqrt(total / width + eps))


# --- shapes -----------------------------------------------------------------------------------------

SMALL = 4 << 20
"""Matrices below so many elements are latency, not bandwidth: they are never split."""
FULL = 120
"""So many programs fill the card."""


def up(value: int, unit: int) -> int:
    """Rounded up to whole units."""
    return -(-value // unit) * unit


def parts(outer: int, inner: int) -> int:
    """Into how many parts K is cut, for a weight of this shape. Part of every result's bits."""
    if outer * inner < SMALL:
        return 1
    split = 1
    while split < 8 and -(-outer // 128) * split < FULL and inner // STEP % (split * 2) == 0:
        split *= 2
    return split


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a product is laid out for a number of rows; no bit depends on it."""

    bm: int
    bn: int
    fan: bool
    warps: int
    stages: int


def tiles(outer: int, inner: int, rows: int, *, least: int = 16) -> Tiles:
    """Tiles for a weight of this shape. `rows` is a multiple of 16; `least` columns stay together."""
    if outer * inner < SMALL:
        bm = 32 if rows % 32 == 0 else 16
        bn = (32 if outer >= 2048 else 16) if rows <= 128 else 64
        return Tiles(bm, max(bn, least), False, 8, 1)
    if rows <= 64:
        bm = rows if rows in (16, 32, 64) else 16
        return Tiles(bm, max(128, least), True, 4, 4)
    bm = 128 if rows % 128 == 0 else 64 if rows % 64 == 0 else 16
    many = rows // bm * -(-outer // 128)
    return Tiles(bm, max(128, least), many < FULL, 8 if bm >= 64 else 4, 3)


@dataclass(slots=True)
class Matrix:
    """A weight as the kernels read it: [outer, inner], both padded with zeros."""

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
        tall, wide = up(outer, 128), up(inner, STEP * split)
        if (tall, wide) == (outer, inner):
            packed = moved.to(dtype).contiguous()
        else:
            packed = torch.zeros(tall, wide, dtype=dtype, device=device)
            packed[:outer, :inner] = moved.to(dtype)
        if bias is not None:
            padded = torch.zeros(tall, dtype=torch.float32, device=device)
            padded[:outer] = bias.to(device)
            bias = padded
        return cls(packed, bias, outer, inner, split)


@dataclass(slots=True)
class Scratch:
    """Room for partial results; kernels of one stream share it."""

    device: torch.device
    partial: torch.Tensor
    tickets: torch.Tensor
    factors: torch.Tensor
    nothing: torch.Tensor

    @classmethod
    def make(cls, device: torch.device, rows: int) -> Scratch:
        def room(count: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        return cls(
            device,
            room(24 << 20, torch.float32),
            room(1 << 16, torch.int32),
            room(rows, torch.float32),
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


def linear(
    matrix: Matrix,
    x: torch.Tensor,
    rows: int,
    kind: Any,
    scratch: Scratch,
    *,
    out: torch.Tensor | None = None,
    low: torch.Tensor | None = None,
    norm: float | None = None,
    gather: torch.Tensor | None = None,
    turn: Turn | None = None,
    pdl: bool = False,
    layout: Tiles | None = None,
) -> None:
    """The product of `rows` rows (a multiple of 16) with a matrix; `norm` is the norm's epsilon."""
    least = turn.wide if turn is not None and turn.query_norm is not None else 16
    split, outer, inner = matrix.split, up(matrix.outer, 16), matrix.weight.shape[1]
    chosen = layout or tiles(matrix.outer, inner, rows, least=least)
    columns = -(-outer // chosen.bn)
    tiles_m = rows // chosen.bm
    eps, none, t = 0.0 if norm is None else norm, scratch.nothing, turn
    result = out if out is not None else low
    assert result is not None
    launch: dict[str, Any] = {"num_warps": chosen.warps, "enable_fp_fusion": False, "PDL": pdl}
    if pdl:
        launch["launch_pdl"] = True
    common = {
        "BM": chosen.bm, "BN": chosen.bn, "KIND": kind, "BIAS": matrix.bias is not None,
        "GATHER": gather is not None,
        "Q_HEADS": t.heads if t else 1, "KV_HEADS": t.kv_heads if t else 1,
        "HEAD": t.head if t else 2, "WIDE": t.wide if t else 2,
        "HEAD_LEVELS": (t.wide if t else 2).bit_length() - 1,
        "ROPE": t.rope if t else False,
        "HEAD_NORM": t is not None and t.query_norm is not None,
    }  # fmt: skip
    turning = (
        t.positions if t else none, t.slots if t else none,
        t.cosines if t else none, t.sines if t else none,
        t.keys if t else none, t.values if t else none,
        t.query_norm if t and t.query_norm is not None else none,
        t.key_norm if t and t.key_norm is not None else none,
    )  # fmt: skip
    ends = (
        none if matrix.bias is None else matrix.bias,
        none if out is None else out, none if low is None else low,
    )  # fmt: skip
    chooser = none if gather is None else gather
    if matrix.outer * inner < SMALL:
        short_kernel[(tiles_m * columns,)](
            x, matrix.weight, *ends, chooser, *turning,
            tiles_m, x.stride(0), result.stride(0), inner, float(matrix.inner), eps,
            LANES=128, ITER=-(-inner // 1024), NORM=UNSCALED if norm is None else NORMED,
            **common, **launch,
        )  # fmt: skip
        return
    if norm is not None:
        extra = {"launch_pdl": True} if pdl else {}
        factor_kernel[(rows,)](
            x, scratch.factors, chooser, x.stride(0), matrix.inner, eps,
            WIDTH=triton.next_power_of_2(matrix.inner), GATHER=gather is not None, PDL=pdl,
            num_warps=8, enable_fp_fusion=False, **extra,
        )  # fmt: skip
    fan = chosen.fan and rows * columns * split * chosen.bn <= len(scratch.partial)
    linear_kernel[(tiles_m * columns * (split if fan else 1),)](
        x, matrix.weight, *ends, scratch.factors, chooser, scratch.partial, scratch.tickets,
        *turning, tiles_m, x.stride(0), result.stride(0), inner // split, eps,
        BK=STEP, SPLIT=split, FAN=fan, NORM=UNSCALED if norm is None else KNOWN,
        STAGES=chosen.stages, **common, **launch,
    )  # fmt: skip
