# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""Matrix products whose sums run in an order that the weight's shape alone fixes.

K is cut into `split` equal parts, a number that follows from the shape of the weight. Within a part
the tensor cores add steps of 16 one after the other; parts are added in order. How many rows stand
in a tile, and whether the parts are summed by one program or by several, changes no bit: few rows
spread the parts over the card, many rows take them one after the other.

The norm before a product is folded into it: its weight is part of the matrix, and its factor, one
number per row, is applied to the result.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from triton.language.extra.cuda import (  # type: ignore[import-not-found,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)

from outstride.ops.cuda.matrices import (
    SMALL,
    STEP,
    Matrix,
    Scratch,
    Tiles,
    Turn,
    chains_of,
    tiles,
    up,
)

_SIDE, _SQUARE = tl.constexpr(STEP), tl.constexpr(STEP * STEP)

SHORT_ROWS = 64
"""Up to so many rows, the product with a small matrix works out the norm's factor itself."""
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
def _column(w, cols, k_all):
    """Where the columns of a product begin in a weight: its rows, in squares."""
    return w + (cols // _SIDE).to(tl.int64) * (k_all * _SIDE) + cols % _SIDE * _SIDE


@triton.jit
def _prefetch(w, cols, k_all, start, part, BN: tl.constexpr, LINES: tl.constexpr):
    """Asks for a tile of weights before anything that it waits for is there."""
    line = tl.minimum(tl.arange(0, LINES) * _SIDE, part - _SIDE)
    at = _column(w, cols, k_all)[:, None] + (start + line)[None, :].to(tl.int64) * _SIDE
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [at.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _early(rows, cols, out, ld_out, positions, slots, cosines, sines,
           BM: tl.constexpr, BN: tl.constexpr, KIND: tl.constexpr, Q_HEADS: tl.constexpr,
           KV_HEADS: tl.constexpr, HEAD: tl.constexpr, WIDE: tl.constexpr,
           ROPE: tl.constexpr):  # fmt: skip
    """What the end of a tile needs from memory: asked for before the product."""
    one = tl.zeros((BM, BN // 2), dtype=tl.float32)
    two = one
    slot = tl.zeros((BM,), dtype=tl.int64)
    if KIND == ADDED:
        both = tl.load(out + rows[:, None].to(tl.int64) * ld_out + cols[None, :])
        one, two = tl.split(tl.reshape(both, (BM, BN // 2, 2)))
    if KIND == HEADS:
        slot = tl.load(slots + rows).to(tl.int64)
        if ROPE:
            pair = tl.max(tl.reshape(cols // 2, (BN // 2, 2)), axis=1)
            head, place = pair // (WIDE // 2), pair % (WIDE // 2)
            turned = (head < Q_HEADS + KV_HEADS) & (place < HEAD // 2)
            position = tl.load(positions + rows).to(tl.int64)
            angle = position[:, None] * (HEAD // 2) + place[None, :]
            both = turned[None, :] & (position >= 0)[:, None]
            one = tl.load(cosines + angle, mask=both, other=1.0)
            two = tl.load(sines + angle, mask=both, other=0.0)
    return one, two, slot


@triton.jit
def _finish(y, one, two, slot, rows, cols, bias, out, low, ld_out, keys, values, query_norm,
            key_norm, eps,
            BM: tl.constexpr, BN: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
            Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr,
            WIDE: tl.constexpr, LEVELS: tl.constexpr, ROPE: tl.constexpr,
            HEAD_NORM: tl.constexpr):  # fmt: skip
    """What becomes of a tile of results; `one`, `two` and `slot` are from `_early`."""
    if BIAS:
        y += tl.load(bias + cols)[None, :]
    if KIND == FLOATS:
        tl.store(out + rows[:, None].to(tl.int64) * ld_out + cols[None, :], y)
    if KIND == ADDED:
        at = rows[:, None].to(tl.int64) * ld_out + cols[None, :]
        y += tl.reshape(tl.join(one, two), (BM, BN))
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
            new = tl.where(turned[None, :], even * one - odd * two, even)
            odd = tl.where(turned[None, :], odd * one + even * two, odd)
            even = new
        lean = low.dtype.element_ty
        even, odd = even.to(lean), odd.to(lean)
        here = inside[None, :] & (rows >= 0)[:, None]
        is_query = here & (head < Q_HEADS)[None, :]
        at = rows[:, None].to(tl.int64) * (Q_HEADS * WIDE) + (head * WIDE)[None, :]
        tl.store(low + at + at_even[None, :], even, mask=is_query)
        tl.store(low + at + at_odd[None, :], odd, mask=is_query)
        entry = slot * (KV_HEADS * WIDE)
        is_key = here & turned[None, :] & (head >= Q_HEADS)[None, :]
        at = entry[:, None] + ((head - Q_HEADS) * WIDE)[None, :]
        tl.store(keys + at + at_even[None, :], even, mask=is_key)
        tl.store(keys + at + at_odd[None, :], odd, mask=is_key)
        known = head < Q_HEADS + 2 * KV_HEADS
        is_value = here & known[None, :] & (head >= Q_HEADS + KV_HEADS)[None, :]
        at = entry[:, None] + ((head - Q_HEADS - KV_HEADS) * WIDE)[None, :]
        tl.store(values + at + at_even[None, :], even, mask=is_value)
        tl.store(values + at + at_odd[None, :], odd, mask=is_value)


@triton.jit
def _chain(a, b, steps, hop, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
           CHAINS: tl.constexpr, GRAM: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """One part of K, in chains that wait for each other only at the end.

    With GRAM also the products of the rows with each other, of which the diagonal is wanted.
    """
    y0 = tl.zeros((BM, BN), dtype=tl.float32)
    g0 = tl.zeros((BM, BM), dtype=tl.float32)
    y1, y2, y3 = y0, y0, y0
    g1, g2, g3 = g0, g0, g0
    for _ in tl.range(0, steps, num_stages=STAGES):
        left = tl.load(a)
        y0 = tl.dot(left, tl.load(b), y0)
        if GRAM:
            g0 = tl.dot(left, tl.trans(left), g0)
        if CHAINS > 1:
            left = tl.load(a + hop)
            y1 = tl.dot(left, tl.load(b + hop * _SIDE), y1)
            if GRAM:
                g1 = tl.dot(left, tl.trans(left), g1)
        if CHAINS > 2:
            left = tl.load(a + 2 * hop)
            y2 = tl.dot(left, tl.load(b + 2 * hop * _SIDE), y2)
            if GRAM:
                g2 = tl.dot(left, tl.trans(left), g2)
        if CHAINS > 3:
            left = tl.load(a + 3 * hop)
            y3 = tl.dot(left, tl.load(b + 3 * hop * _SIDE), y3)
            if GRAM:
                g3 = tl.dot(left, tl.trans(left), g3)
        a += BK
        b += BK * _SIDE
    if CHAINS > 1:
        y0 += y1
        g0 += g1
    if CHAINS > 2:
        y0 += y2
        g0 += g2
    if CHAINS > 3:
        y0 += y3
        g0 += g3
    return y0, g0


@triton.jit
def _diagonal(gram, BM: tl.constexpr):
    at = tl.arange(0, BM)
    return tl.sum(tl.where(at[:, None] == at[None, :], gram, 0.0), axis=1)


@triton.jit(do_not_specialize=["tiles_m"])
def linear_kernel(
    x, w, bias, out, low, factors, gather, partial, tickets,
    positions, slots, cosines, sines, keys, values, query_norm, key_norm,
    tiles_m, ld_x, ld_out, part, hop, width, eps,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    FAN: tl.constexpr, NORM: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
    GATHER: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr, WIDE: tl.constexpr, HEAD_LEVELS: tl.constexpr, ROPE: tl.constexpr,
    HEAD_NORM: tl.constexpr, CHAINS: tl.constexpr, LINES: tl.constexpr, STAGES: tl.constexpr,
    LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x @ w.T, and what follows it. `part` columns make a part of K; x and w have whole parts."""
    pid = tl.program_id(0)
    first = pid % SPLIT if FAN else 0
    tile = pid // SPLIT if FAN else pid
    rows = tile % tiles_m * BM + tl.arange(0, BM)
    cols = tile // tiles_m * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    k_all = part * SPLIT
    within = ks // _SIDE * _SQUARE + ks % _SIDE if BK > _SIDE else ks
    start = (first * part).to(tl.int64) * _SIDE if FAN else 0
    b = _column(w, cols, k_all)[None, :] + start + within[:, None]
    if PDL:
        if LINES > 0:
            _prefetch(w, cols, k_all, first * part, part, BN, LINES)
        gdc_wait()
        if not LATE:
            gdc_launch_dependents()
    early: tl.constexpr = BM * BN <= 2048
    if early:
        one, two, slot = _early(rows, cols, out, ld_out, positions, slots, cosines, sines, BM, BN,
                                KIND, Q_HEADS, KV_HEADS, HEAD, WIDE, ROPE)  # fmt: skip
    source = rows
    if GATHER:
        source = tl.load(gather + rows)
    a = x + source[:, None].to(tl.int64) * ld_x + (first * part + ks)[None, :]
    measured: tl.constexpr = NORM == NORMED
    y, gram = _chain(a, b, hop // BK, hop, BM, BN, BK, CHAINS, measured,
                     STAGES)  # fmt: skip
    if PDL and LATE:
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
                more, _ = _chain(a + s * part, b + s * part * _SIDE, part // BK, part, BM, BN, BK, 1,
                                 False, STAGES)  # fmt: skip
                y += more
    if last:
        if measured:
            y *= tl.math.rsqrt(_diagonal(gram, BM) / width + eps)[:, None]
        if NORM == KNOWN:
            y *= tl.load(factors + rows)[:, None]
        if not early:
            one, two, slot = _early(rows, cols, out, ld_out, positions, slots, cosines, sines, BM,
                                    BN, KIND, Q_HEADS, KV_HEADS, HEAD, WIDE, ROPE)  # fmt: skip
        _finish(y, one, two, slot, rows, cols, bias, out, low, ld_out, keys, values, query_norm,
                key_norm, eps, BM, BN, KIND, BIAS, Q_HEADS, KV_HEADS, HEAD, WIDE, HEAD_LEVELS,
                ROPE, HEAD_NORM)  # fmt: skip


@triton.jit
def factor_kernel(x, factors, gather, ld_x, width, eps, WIDTH: tl.constexpr,
                  GATHER: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """The factor of the norm: one program adds up one row."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    source = tl.load(gather + row) if GATHER else row
    k = tl.arange(0, WIDTH)
    at = source.to(tl.int64) * ld_x + k
    wide = tl.load(x + at, mask=k < width, other=0.0).to(tl.float32)
    total = tl.sum(wide * wide, axis=0)
    tl.store(factors + row, tl.math.rsqrt(total / width + eps))


@triton.jit
def gram_factor_kernel(x, factors, gather, ld_x, hop, width, eps, BK: tl.constexpr,
                       CHAINS: tl.constexpr, GATHER: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """The factor of the norm for sixteen rows, added up as `linear_kernel` adds it."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    rows = tl.program_id(0) * 16 + tl.arange(0, 16)
    source = tl.load(gather + rows) if GATHER else rows
    a = x + source[:, None].to(tl.int64) * ld_x + tl.arange(0, BK)[None, :]
    g0 = tl.zeros((16, 16), dtype=tl.float32)
    g1, g2, g3 = g0, g0, g0
    for _ in tl.range(0, hop // BK, num_stages=4):
        left = tl.load(a)
        g0 = tl.dot(left, tl.trans(left), g0)
        if CHAINS > 1:
            left = tl.load(a + hop)
            g1 = tl.dot(left, tl.trans(left), g1)
        if CHAINS > 2:
            left = tl.load(a + 2 * hop)
            g2 = tl.dot(left, tl.trans(left), g2)
        if CHAINS > 3:
            left = tl.load(a + 3 * hop)
            g3 = tl.dot(left, tl.trans(left), g3)
        a += BK
    if CHAINS > 1:
        g0 += g1
    if CHAINS > 2:
        g0 += g2
    if CHAINS > 3:
        g0 += g3
    tl.store(factors + rows, tl.math.rsqrt(_diagonal(g0, 16) / width + eps))


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
    ahead: bool = False,
    layout: Tiles | None = None,
) -> None:
    """The product of `rows` rows (a multiple of 16) with a matrix; `norm` is the norm's epsilon.

    ahead: the weights are worth asking for while the kernel before is still running.
    """
    least = turn.wide if turn is not None and turn.query_norm is not None else 16
    split, outer, inner = matrix.split, up(matrix.outer, 16), matrix.weight.shape[1]
    chosen = layout or tiles(matrix.outer, inner, rows, least=least, normed=norm is not None)
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
    small, how = matrix.outer * inner < SMALL, UNSCALED
    chains = chains_of(inner) if small else 1
    hop = inner // split // chains
    step = chosen.step if hop % chosen.step == 0 else STEP
    if norm is not None:
        how = NORMED
        extra = {"launch_pdl": True} if pdl else {}
        options = {"GATHER": gather is not None, "PDL": pdl, "enable_fp_fusion": False, **extra}
        if small and rows > SHORT_ROWS:
            how = KNOWN
            gram_factor_kernel[(rows // 16,)](
                x, scratch.factors, chooser, x.stride(0), hop,
                float(matrix.inner), eps, BK=STEP, CHAINS=chains, num_warps=2, **options,
            )  # fmt: skip
        elif not small:
            how = KNOWN
            factor_kernel[(rows,)](
                x, scratch.factors, chooser, x.stride(0), matrix.inner, eps,
                WIDTH=triton.next_power_of_2(matrix.inner), num_warps=8, **options,
            )  # fmt: skip
    fan = chosen.fan and rows * columns * split * chosen.bn <= len(scratch.partial)
    lines = min(triton.next_power_of_2(-(-inner // split // 64)), 64 if ahead else chosen.lines)
    linear_kernel[(tiles_m * columns * (split if fan else 1),)](
        x, matrix.weight, *ends, scratch.factors, chooser, scratch.partial, scratch.tickets,
        *turning, tiles_m, x.stride(0), result.stride(0), inner // split, hop,
        float(matrix.inner), eps, BK=step, SPLIT=split, FAN=fan, NORM=how, CHAINS=chains,
        LINES=lines, LATE=chosen.late, STAGES=chosen.stages, **common, **launch,
    )  # fmt: skip
