# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""Matrix products whose sums run in an order that the weight's shape alone fixes.

K is cut into `split` equal parts, a number that follows from the shape of the weight. Within a part
the tensor cores add steps of 16 one after the other; parts are added in order. How many rows a
tile has, and whether the parts are summed by one program or by several, changes no bit: with few rows
the parts are spread over the GPU, with many rows a program takes them one after the other.

The norm before a product is folded into it: its weight is part of the matrix, and its factor, one
number per row, is applied to the result. The factor comes from sums of squares over groups of columns,
always the same groups, added up as a tree. The product before stores them with its result; where there
is none, `squares_kernel` computes them.
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

from outstride.ops.cuda.epilogue import (
    ADDED,
    FLOATS,
    GATED,
    HEADS,
    epilogue,
    pair_sum,
    prepare,
    square_sums,
)
from outstride.ops.cuda.matrices import (
    SMALL,
    STEP,
    LinearScratch,
    LinearTiles,
    PackedMatrix,
    QkvOutput,
    norm_group,
    norm_groups,
    num_chains,
    round_up,
    tiles_for,
)

__all__ = ["ADDED", "FLOATS", "GATED", "HEADS", "linear", "linear_kernel", "squares_kernel"]

_SIDE, _SQUARE = tl.constexpr(STEP), tl.constexpr(STEP * STEP)


@triton.jit
def _column(w, cols, k_all):
    """Where the columns of a product begin in a weight, whose rows are stored in squares."""
    return w + (cols // _SIDE).to(tl.int64) * (k_all * _SIDE) + cols % _SIDE * _SIDE


@triton.jit
def _prefetch(w, cols, k_all, start, part, BN: tl.constexpr, LINES: tl.constexpr):
    """Prefetches a tile of weights while the kernel before is still running."""
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
def _chain(a, b, steps, hop, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
           CHAINS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """One part of K [BM, BN], in chains that are added up at the end."""
    y0 = tl.zeros((BM, BN), dtype=tl.float32)
    y1, y2, y3 = y0, y0, y0
    for _ in tl.range(0, steps, num_stages=STAGES):
        y0 = tl.dot(tl.load(a), tl.load(b), y0)
        if CHAINS > 1:
            y1 = tl.dot(tl.load(a + hop), tl.load(b + hop * _SIDE), y1)
        if CHAINS > 2:
            y2 = tl.dot(tl.load(a + 2 * hop), tl.load(b + 2 * hop * _SIDE), y2)
        if CHAINS > 3:
            y3 = tl.dot(tl.load(a + 3 * hop), tl.load(b + 3 * hop * _SIDE), y3)
        a += BK
        b += BK * _SIDE
    if CHAINS > 1:
        y0 += y1
    if CHAINS > 2:
        y0 += y2
    if CHAINS > 3:
        y0 += y3
    return y0


@triton.jit
def _bulk_chain(x, w, row, column, start, steps, BM: tl.constexpr, BN: tl.constexpr,
                STAGES: tl.constexpr):  # fmt: skip
    """One part of K in one chain, whole squares fetched by the tensor memory accelerator."""
    y = tl.zeros((BM, BN), dtype=tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        k = start + step * _SIDE
        squares = tl.reshape(w.load([column // _SIDE, k, 0]), (BN, _SIDE))
        y = tl.dot(x.load([row, k]), tl.trans(squares), y)
    return y


@triton.jit(do_not_specialize=["tiles_m"])
def linear_kernel(
    x, w, bias, out, low, sums, gather, partial, counters,
    positions, slots, cos, sin, keys, values, query_norm, key_norm,
    tiles_m, ld_x, ld_out, part, hop, width, eps,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    FAN: tl.constexpr, NORM: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
    GATHER: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr, WIDE: tl.constexpr, HEAD_LEVELS: tl.constexpr, ROPE: tl.constexpr,
    HEAD_NORM: tl.constexpr, CHAINS: tl.constexpr, LINES: tl.constexpr, STAGES: tl.constexpr,
    LATE: tl.constexpr, PDL: tl.constexpr, BULK: tl.constexpr, GRAIN: tl.constexpr,
    LEVELS: tl.constexpr, LANES: tl.constexpr, LANE_LEVELS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """x [rows, K] @ w.T [K, columns], and the epilogue. `part` columns make a part of K.

    NORM: `sums` has the sums of squares of the rows of x. With ADDED, those of the result go there.
    """
    pid = tl.program_id(0)
    first = pid % SPLIT if FAN else 0
    tile = pid // SPLIT if FAN else pid
    row, column = tile % tiles_m * BM, tile // tiles_m * BN
    rows = row + tl.arange(0, BM)
    cols = column + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    k_all = part * SPLIT
    within = ks // _SIDE * _SQUARE + ks % _SIDE if BK > _SIDE else ks
    start = (first * part).to(tl.int64) * _SIDE if FAN else 0
    if not BULK:
        b = _column(w, cols, k_all)[None, :] + start + within[:, None]
    if PDL:
        if LINES > 0:
            _prefetch(w, cols, k_all, first * part, part, BN, LINES)
        gdc_wait()
        if not LATE:
            gdc_launch_dependents()
    early: tl.constexpr = BM * BN <= 2048
    if early:
        one, two, slot = prepare(rows, column, out, ld_out, positions, slots, cos, sin, BM,
                                 BN, KIND, Q_HEADS, KV_HEADS, HEAD, WIDE, ROPE)  # fmt: skip
    if NORM:  # read now, added up later
        lane = tl.arange(0, LANES)
        squares = tl.load(sums + rows[:, None] * LANES + lane[None, :],
                          mask=(lane < GROUPS)[None, :], other=0.0)  # fmt: skip
    if BULK:
        y = _bulk_chain(x, w, row, column, first * part, hop // _SIDE, BM, BN, STAGES)
    else:
        source = rows
        if GATHER:
            source = tl.load(gather + rows)
        a = x + source[:, None].to(tl.int64) * ld_x + (first * part + ks)[None, :]
        y = _chain(a, b, hop // BK, hop, BM, BN, BK, CHAINS, STAGES)
    if PDL and LATE:
        gdc_launch_dependents()
    last = True
    if SPLIT > 1:
        if FAN:
            at = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
            tl.store(partial + (tile * SPLIT + first) * (BM * BN) + at, y)
            tl.debug_barrier()
            last = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
            if last:
                mine = partial + tile * SPLIT * (BM * BN) + at
                y = tl.load(mine, cache_modifier=".cg")
                for s in tl.static_range(1, SPLIT):
                    y += tl.load(mine + s * (BM * BN), cache_modifier=".cg")
                tl.store(counters + tile, 0)
        else:
            for s in range(1, SPLIT):
                if BULK:
                    y += _bulk_chain(x, w, row, column, s * part, part // _SIDE, BM, BN, STAGES)
                else:
                    y += _chain(a + s * part, b + s * part * _SIDE, part // BK, part, BM, BN, BK,
                                1, STAGES)  # fmt: skip
    if last:
        if NORM:
            y *= tl.math.rsqrt(pair_sum(squares, BM, LANES, LANE_LEVELS) / width + eps)[:, None]
        if not early:
            one, two, slot = prepare(rows, column, out, ld_out, positions, slots, cos, sin,
                                     BM, BN, KIND, Q_HEADS, KV_HEADS, HEAD, WIDE, ROPE)  # fmt: skip
        epilogue(y, one, two, slot, rows, column, bias, out, low, ld_out, keys, values, query_norm,
                 key_norm, eps, sums, BM, BN, KIND, BIAS, Q_HEADS, KV_HEADS, HEAD, WIDE,
               HEAD_LEVELS, ROPE, HEAD_NORM, GRAIN, LEVELS, LANES)  # fmt: skip


@triton.jit
def squares_kernel(x, sums, gather, ld_x, width, WIDTH: tl.constexpr, GRAIN: tl.constexpr,
                   LEVELS: tl.constexpr, LANES: tl.constexpr, GATHER: tl.constexpr,
                   PDL: tl.constexpr):  # fmt: skip
    """The sums of squares of one row, as a product stores them."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    source = tl.load(gather + row) if GATHER else row
    k = tl.arange(0, WIDTH)
    at = source.to(tl.int64) * ld_x + k
    wide = tl.load(x + at, mask=k < width, other=0.0).to(tl.float32)
    found = square_sums(wide, WIDTH // GRAIN, GRAIN, LEVELS)
    lane = tl.arange(0, WIDTH // GRAIN)
    tl.store(sums + row * LANES + lane, found, mask=lane < LANES)


def linear(
    matrix: PackedMatrix,
    x: torch.Tensor,
    rows: int,
    kind: Any,
    scratch: LinearScratch,
    *,
    out: torch.Tensor | None = None,
    low: torch.Tensor | None = None,
    norm: float | None = None,
    gather: torch.Tensor | None = None,
    qkv: QkvOutput | None = None,
    pdl: bool = False,
    prefetch: bool = False,
    summed: bool = False,
    tiles: LinearTiles | None = None,
) -> None:
    """The product of `rows` rows of x (a multiple of 16) with a matrix, and an epilogue of this kind.

    out, low: where the result goes, in float32 and in the format of the weights.
    norm: the epsilon of the norm before the product. gather: which rows of x are read.
    prefetch: the weights are worth prefetching while the kernel before is still running.
    summed: x is what an ADDED product stored in these rows, and so are its sums of squares.
    """
    width = matrix.outer if kind is ADDED else matrix.inner
    size, count = norm_group(width), norm_groups(width)
    min_columns = qkv.head_width if qkv is not None and qkv.query_norm is not None else 16
    if kind is ADDED:
        min_columns = max(min_columns, size)
    inner, none = matrix.weight.shape[1], scratch.none
    chosen = tiles or tiles_for(matrix.outer, inner, rows, min_columns=min_columns)
    columns, tiles_m = -(-round_up(matrix.outer, 16) // chosen.bn), rows // chosen.bm
    extra: dict[str, Any] = {"enable_fp_fusion": False, **({"launch_pdl": True} if pdl else {})}
    groups = {"GRAIN": size, "LEVELS": size.bit_length() - 1, "LANES": count}
    gathered = none if gather is None else gather
    if norm is not None and not summed:
        squares_kernel[(rows,)](
            x, scratch.sums, gathered, x.stride(0), matrix.inner,
            WIDTH=triton.next_power_of_2(matrix.inner), GATHER=gather is not None, PDL=pdl,
            num_warps=8 if matrix.inner > 2048 else 2, **groups, **extra,
        )  # fmt: skip
    fan = chosen.fan and rows * columns * matrix.split * chosen.bn <= len(scratch.partial)
    source, weight, schedule = _schedule(matrix, x, chosen, gather is None and pdl, prefetch)
    hop, result = schedule.pop("hop"), out if out is not None else low
    assert result is not None
    linear_kernel[(tiles_m * columns * (matrix.split if fan else 1),)](
        source, weight, none if matrix.bias is None else matrix.bias,
        none if out is None else out, none if low is None else low,
        scratch.sums, gathered, scratch.partial, scratch.counters, *_qkv_tensors(qkv, none),
        tiles_m, x.stride(0), result.stride(0), inner // matrix.split, hop,
        float(matrix.inner), 0.0 if norm is None else norm, BM=chosen.bm, BN=chosen.bn,
        SPLIT=matrix.split, FAN=fan, NORM=norm is not None, KIND=kind,
        BIAS=matrix.bias is not None, GATHER=gather is not None, LATE=chosen.late,
        STAGES=chosen.stages, PDL=pdl, LANE_LEVELS=count.bit_length() - 1,
        GROUPS=-(-width // size), num_warps=chosen.warps, **schedule, **_qkv_sizes(qkv),
        **groups, **extra,
    )  # fmt: skip


def _schedule(
    matrix: PackedMatrix, x: torch.Tensor, tiles: LinearTiles, may_bulk: bool, prefetch: bool
) -> tuple[Any, Any, dict[str, Any]]:
    """Input and weight as the kernel takes them, and in what steps it goes through K."""
    inner, bulk = matrix.weight.shape[1], tiles.bulk and may_bulk
    chains = num_chains(inner) if matrix.outer * inner < SMALL else 1
    hop = inner // matrix.split // chains
    source, weight, lines = x, matrix.weight, 0
    if bulk:
        source, weight = matrix.bulk(x, tiles.bm, tiles.bn)
    else:
        whole = triton.next_power_of_2(-(-inner // matrix.split // 64))
        lines = min(whole, 64 if prefetch else tiles.lines)
    step = tiles.step if hop % tiles.step == 0 else STEP
    return source, weight, {"hop": hop, "BK": step, "CHAINS": chains, "LINES": lines, "BULK": bulk}


def _qkv_tensors(qkv: QkvOutput | None, none: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Positions, slots, cos, sin, keys, values, and the norms of queries and keys."""
    if qkv is None:
        return (none,) * 8
    norms = (none if norm is None else norm for norm in (qkv.query_norm, qkv.key_norm))
    return (qkv.positions, qkv.slots, qkv.cos, qkv.sin, qkv.keys, qkv.values, *norms)


def _qkv_sizes(qkv: QkvOutput | None) -> dict[str, Any]:
    """The sizes of heads, as constants of the kernel."""
    width = qkv.head_width if qkv else 2
    return {
        "Q_HEADS": qkv.heads if qkv else 1, "KV_HEADS": qkv.kv_heads if qkv else 1,
        "HEAD": qkv.head_dim if qkv else 2, "WIDE": width,
        "HEAD_LEVELS": width.bit_length() - 1, "ROPE": qkv.rope if qkv else False,
        "HEAD_NORM": qkv is not None and qkv.query_norm is not None,
    }  # fmt: skip
