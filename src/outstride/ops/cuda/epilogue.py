# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""The end of `linear_kernel`: what is made of a tile [BM, BN] of a product.

Addresses are written so that the compiler sees which of them are contiguous, and stores whole lines at
once: otherwise this takes a fifth of the time of a product with 64 rows.
"""

from __future__ import annotations

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

FLOATS = tl.constexpr(0)
"""The result in float32."""
GATED = tl.constexpr(1)
"""Columns are pairs of gate and up: silu(gate) * up in the format of the weights."""
ADDED = tl.constexpr(2)
"""Added to the residual stream, in float32 and in the format of the weights."""
HEADS = tl.constexpr(3)
"""Queries, keys and values: head norms, RoPE, and the KV cache."""


@triton.jit
def pair_sum(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr):
    """[ROWS, WIDTH] -> [ROWS]: neighbours are added, then neighbouring sums, whatever the layout."""
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (ROWS, WIDTH >> (level + 1), 2)), axis=2)
    return tl.reshape(x, (ROWS,))


@triton.jit
def square_sums(y, count: tl.constexpr, GRAIN: tl.constexpr, LEVELS: tl.constexpr):
    """Sums of squares over groups of columns; `count` groups in all."""
    return pair_sum(tl.reshape(y * y, (count, GRAIN)), count, GRAIN, LEVELS)


@triton.jit
def _pairs(column, BN: tl.constexpr, WIDE: tl.constexpr):
    """The heads and places of a tile's pairs of columns: one head, if a tile is no wider."""
    if BN <= WIDE:
        head = column // WIDE
        place = tl.multiple_of(column % WIDE // 2, BN // 2) + tl.arange(0, BN // 2)
    else:
        pair = column // 2 + tl.arange(0, BN // 2)
        head, place = pair // (WIDE // 2), pair % (WIDE // 2)
    return head, place


@triton.jit
def prepare(rows, column, out, ld_out, positions, slots, cos, sin,
           BM: tl.constexpr, BN: tl.constexpr, KIND: tl.constexpr, Q_HEADS: tl.constexpr,
           KV_HEADS: tl.constexpr, HEAD: tl.constexpr, WIDE: tl.constexpr,
           ROPE: tl.constexpr):  # fmt: skip
    """Loads what the epilogue needs, before the product: the residual, or cos, sin and slots."""
    one = tl.zeros((BM, BN // 2), dtype=tl.float32)
    two = one
    slot = tl.zeros((BM,), dtype=tl.int64)
    if KIND == ADDED:
        cols = column + tl.arange(0, BN)
        both = tl.load(out + rows[:, None].to(tl.int64) * ld_out + cols[None, :])
        one, two = tl.split(tl.reshape(both, (BM, BN // 2, 2)))
    if KIND == HEADS:
        slot = tl.load(slots + rows).to(tl.int64)
        if ROPE:
            head, place = _pairs(column, BN, WIDE)
            rotated = (head < Q_HEADS + KV_HEADS) & (place < HEAD // 2)
            position = tl.load(positions + rows).to(tl.int64)
            angle = position[:, None] * (HEAD // 2) + place[None, :]
            both = rotated[None, :] & (position >= 0)[:, None]
            one = tl.load(cos + angle, mask=both, other=1.0)
            two = tl.load(sin + angle, mask=both, other=0.0)
    return one, two, slot


@triton.jit
def _one_head(y, one, two, slot, rows, column, low, keys, values,
              BM: tl.constexpr, BN: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
              HEAD: tl.constexpr, WIDE: tl.constexpr, ROPE: tl.constexpr):  # fmt: skip
    """The epilogue of a tile within one head, which is one of queries, keys or values."""
    head, begin = column // WIDE, tl.multiple_of(column % WIDE, BN)
    kind = low.dtype.element_ty
    kv = slot[:, None] * (KV_HEADS * WIDE)
    if head < Q_HEADS + KV_HEADS:
        even, odd = tl.split(tl.reshape(y, (BM, BN // 2, 2)))
        if ROPE:
            new = even * one - odd * two
            odd = odd * one + even * two
            even = new
        even, odd = even.to(kind), odd.to(kind)
        place = tl.multiple_of(begin // 2, BN // 2) + tl.arange(0, BN // 2)
        inside = (place < HEAD // 2)[None, :] & (rows >= 0)[:, None]
        if head < Q_HEADS:
            at = low + rows[:, None].to(tl.int64) * (Q_HEADS * WIDE) + head * WIDE + place[None, :]
            tl.store(at, even, mask=inside)
            tl.store(at + HEAD // 2, odd, mask=inside)
        else:
            at = keys + kv + (head - Q_HEADS) * WIDE + place[None, :]
            tl.store(at, even, mask=inside)
            tl.store(at + HEAD // 2, odd, mask=inside)
    elif head < Q_HEADS + 2 * KV_HEADS:
        place = begin + tl.arange(0, BN)
        at = values + kv + (head - Q_HEADS - KV_HEADS) * WIDE + place[None, :]
        inside = (place < HEAD)[None, :] & (rows >= 0)[:, None]
        tl.store(at, y.to(kind), mask=inside)


@triton.jit
def epilogue(y, one, two, slot, rows, column, bias, out, low, ld_out, keys, values, query_norm,
            key_norm, eps, sums,
            BM: tl.constexpr, BN: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
            Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr,
            WIDE: tl.constexpr, HEAD_LEVELS: tl.constexpr, ROPE: tl.constexpr,
            HEAD_NORM: tl.constexpr, GRAIN: tl.constexpr, LEVELS: tl.constexpr,
            LANES: tl.constexpr):  # fmt: skip
    """Stores a tile of results y [BM, BN]; `one`, `two` and `slot` are from `prepare`."""
    cols = column + tl.arange(0, BN)
    if BIAS:
        y += tl.load(bias + cols)[None, :]
    if KIND == FLOATS:
        tl.store(out + rows[:, None].to(tl.int64) * ld_out + cols[None, :], y)
    if KIND == ADDED:
        at = rows[:, None].to(tl.int64) * ld_out + cols[None, :]
        y += tl.reshape(tl.join(one, two), (BM, BN))
        tl.store(out + at, y)
        lean = y.to(low.dtype.element_ty)
        tl.store(low + at, lean)
        groups: tl.constexpr = BN // GRAIN
        found = square_sums(lean.to(tl.float32), BM * groups, GRAIN, LEVELS)
        group = column // GRAIN + tl.arange(0, groups)
        tl.store(sums + rows[:, None] * LANES + group[None, :],
                 tl.reshape(found, (BM, groups)), mask=(group < LANES)[None, :])  # fmt: skip
    if KIND == GATED:
        gate, up = tl.split(tl.reshape(y, (BM, BN // 2, 2)))
        y = gate / (1.0 + tl.exp(-gate)) * up
        half = column // 2 + tl.arange(0, BN // 2)
        at = rows[:, None].to(tl.int64) * ld_out + half[None, :]
        tl.store(low + at, y.to(low.dtype.element_ty))
    if KIND == HEADS and BN <= WIDE and not HEAD_NORM:
        _one_head(y, one, two, slot, rows, column, low, keys, values, BM, BN, Q_HEADS, KV_HEADS,
                  HEAD, WIDE, ROPE)  # fmt: skip
    elif KIND == HEADS:
        even, odd = tl.split(tl.reshape(y, (BM, BN // 2, 2)))
        head, place = _pairs(column, BN, WIDE)
        if BN <= WIDE:
            head = tl.zeros_like(place) + head
        rotated = head < Q_HEADS + KV_HEADS
        inside = place < HEAD // 2
        at_even = tl.where(rotated, place, 2 * place)
        at_odd = tl.where(rotated, place + HEAD // 2, 2 * place + 1)
        if HEAD_NORM:
            per: tl.constexpr = BN // WIDE
            squares = tl.reshape(even * even + odd * odd, (BM * per, WIDE // 2))
            mean = pair_sum(squares, BM * per, WIDE // 2, HEAD_LEVELS - 1) / HEAD
            factor = tl.reshape(tl.math.rsqrt(mean + eps), (BM, per, 1))
            factor = tl.broadcast_to(factor, (BM, per, WIDE // 2))
            factor = tl.reshape(factor, (BM, BN // 2))
            of_query = inside & (head < Q_HEADS)
            of_key = inside & rotated & (head >= Q_HEADS)
            norm = tl.load(query_norm + at_even, mask=of_query, other=1.0)
            norm *= tl.load(key_norm + at_even, mask=of_key, other=1.0)
            even = tl.where(rotated[None, :], even * factor * norm[None, :], even)
            norm = tl.load(query_norm + at_odd, mask=of_query, other=1.0)
            norm *= tl.load(key_norm + at_odd, mask=of_key, other=1.0)
            odd = tl.where(rotated[None, :], odd * factor * norm[None, :], odd)
        if ROPE:
            new = tl.where(rotated[None, :], even * one - odd * two, even)
            odd = tl.where(rotated[None, :], odd * one + even * two, odd)
            even = new
        lean = low.dtype.element_ty
        even, odd = even.to(lean), odd.to(lean)
        here = inside[None, :] & (rows >= 0)[:, None]
        is_query = here & (head < Q_HEADS)[None, :]
        at = rows[:, None].to(tl.int64) * (Q_HEADS * WIDE) + (head * WIDE)[None, :]
        tl.store(low + at + at_even[None, :], even, mask=is_query)
        tl.store(low + at + at_odd[None, :], odd, mask=is_query)
        kv = slot * (KV_HEADS * WIDE)
        is_key = here & rotated[None, :] & (head >= Q_HEADS)[None, :]
        at = kv[:, None] + ((head - Q_HEADS) * WIDE)[None, :]
        tl.store(keys + at + at_even[None, :], even, mask=is_key)
        tl.store(keys + at + at_odd[None, :], odd, mask=is_key)
        known = head < Q_HEADS + 2 * KV_HEADS
        is_value = here & known[None, :] & (head >= Q_HEADS + KV_HEADS)[None, :]
        at = kv[:, None] + ((head - Q_HEADS - KV_HEADS) * WIDE)[None, :]
        tl.store(values + at + at_even[None, :], even, mask=is_value)
        tl.store(values + at + at_odd[None, :], odd, mask=is_value)
