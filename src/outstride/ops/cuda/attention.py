# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention over pages and token graphs, reduced over logical positions.

Keys stand in blocks of 64 by position, whichever slots hold them. Each block yields a partial result
that depends on its keys alone; partial results are folded in order of blocks, by one program that
walks through them or by the last of several that each took some. Which of the two, and how many
queries share a tile, changes no bit. Blocks that a query does not see at all change nothing, either.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from triton.language.extra.cuda import (  # type: ignore[import-not-found,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)

from outstride.ops.cuda.layout import FIELDS, KEYS
from outstride.ops.cuda.linear import pair_sum

_FLOOR = tl.constexpr(-1e30)
"""Stands in for the maximum of a block in which a query sees nothing."""
_FIELDS = tl.constexpr(FIELDS)


@triton.jit
def _fold(peak, total, mixed, new_peak, new_total, new_mixed):
    """One more block."""
    top = tl.maximum(peak, new_peak)
    old, new = tl.exp2(peak - top), tl.exp2(new_peak - top)
    total = total * old + new_total * new
    mixed = mixed * old[:, None] + new_mixed * new[:, None]
    return top, total, mixed


@triton.jit
def attention_kernel(
    queries, keys, values, out, words, limits, positions, partial, partial_sums, tickets,
    scale, window, header,
    GROUP: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDE: tl.constexpr,
    BQ: tl.constexpr, KEYS: tl.constexpr, LEVELS: tl.constexpr, PAGE: tl.constexpr,
    PROGRAMS: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`words` describes the pass: see `layout`. `header` is the place of this window's items."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    count = tl.load(words + header)
    items = words + tl.load(words + header + 1)
    lane = tl.arange(0, KEYS)
    dims = tl.arange(0, WIDE)
    line = tl.arange(0, BQ)
    for work in range(tl.program_id(0), count * KV_HEADS, PROGRAMS):
        item = items + work // KV_HEADS * _FIELDS
        head = work % KV_HEADS
        row_first = tl.load(item)
        nodes = tl.load(item + 1)
        pages_at = tl.load(item + 2)
        blocks_at = tl.load(item + 3)
        start = tl.load(item + 4)
        stop = tl.load(item + 5)
        first = tl.load(item + 6)
        last = tl.load(item + 7)
        pieces = tl.load(item + 8)
        base = tl.load(item + 9)
        ticket = tl.load(item + 10)
        node = line // GROUP
        live = node < nodes
        row = row_first + tl.minimum(node, nodes - 1)
        at = row.to(tl.int64) * (HEADS * WIDE) + (head * GROUP + line % GROUP) * WIDE
        query = tl.load(queries + at[:, None] + dims[None, :], mask=live[:, None], other=0.0)
        limit = tl.load(limits + row)
        floor = tl.load(positions + row) - window
        reach = tl.max(limit, axis=0)
        peak = tl.full((BQ,), _FLOOR, dtype=tl.float32)
        total = tl.zeros((BQ,), dtype=tl.float32)
        mixed = tl.zeros((BQ, WIDE), dtype=tl.float32)
        for block in range(start, stop):
            place = block * KEYS + lane
            listed_at = -1
            if SHARED == 0:
                listed_at = tl.load(words + blocks_at + block, mask=blocks_at >= 0, other=-1)
            paged = listed_at < 0
            page = tl.load(
                words + pages_at + place // PAGE, mask=(place < reach) & paged, other=0
            )
            slot = page * PAGE + place % PAGE
            known = (place < reach) & paged
            if SHARED == 0:
                listed = tl.load(words + listed_at + lane, mask=(lane >= 0) & ~paged, other=-1)
                known = known | (listed >= 0)
                slot = tl.where(paged, slot, listed)
            slot = tl.where(known, slot, 0).to(tl.int64)
            entry = slot[:, None] * (KV_HEADS * WIDE) + head * WIDE + dims[None, :]
            key = tl.load(keys + entry, mask=known[:, None], other=0.0)
            value = tl.load(values + entry, mask=known[:, None], other=0.0)
            seen = known[None, :] & live[:, None] & (place[None, :] > floor[:, None])
            if SHARED:
                seen = seen & (place[None, :] < limit[:, None])
            else:
                seen = seen & ((place[None, :] < limit[:, None]) | (listed >= 0)[None, :])
            scores = tl.dot(query, tl.trans(key)) * scale
            scores = tl.where(seen, scores, float("-inf"))
            new_peak = tl.maximum(tl.max(scores, axis=1), _FLOOR)
            weights = tl.exp2(scores - new_peak[:, None])
            new_total = pair_sum(weights, BQ, KEYS, LEVELS)
            new_mixed = tl.dot(weights.to(value.dtype), value)
            if pieces > 1:
                spot = ((base + block - first) * KV_HEADS + head).to(tl.int64)
                at_sums = partial_sums + spot * (2 * BQ) + line
                tl.store(at_sums, new_peak)
                tl.store(at_sums + BQ, new_total)
                at_mixed = spot * (BQ * WIDE) + line[:, None] * WIDE + dims[None, :]
                tl.store(partial + at_mixed, new_mixed)
            else:
                peak, total, mixed = _fold(peak, total, mixed, new_peak, new_total, new_mixed)
        done = True
        if pieces > 1:
            tl.debug_barrier()
            mine = tickets + ticket * KV_HEADS + head
            done = tl.atomic_add(mine, 1, sem="acq_rel", scope="gpu") == pieces - 1
            if done:
                for block in range(first, last):
                    spot = ((base + block - first) * KV_HEADS + head).to(tl.int64)
                    at_sums = partial_sums + spot * (2 * BQ) + line
                    new_peak = tl.load(at_sums, cache_modifier=".cg")
                    new_total = tl.load(at_sums + BQ, cache_modifier=".cg")
                    at_mixed = spot * (BQ * WIDE) + line[:, None] * WIDE + dims[None, :]
                    new_mixed = tl.load(partial + at_mixed, cache_modifier=".cg")
                    peak, total, mixed = _fold(peak, total, mixed, new_peak, new_total, new_mixed)
                tl.store(mine, 0)
        if done:
            result = tl.math.div_rn(mixed, tl.maximum(total, 1e-30)[:, None])
            tl.store(
                out + at[:, None] + dims[None, :],
                result.to(out.dtype.element_ty),
                mask=live[:, None],
            )


@triton.jit
def embed_kernel(tokens, embedding, x, low, ld, width, WIDTH: tl.constexpr, PDL: tl.constexpr):
    """Rows of the embedding as states, in both formats."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    token = tl.load(tokens + row).to(tl.int64)
    k = tl.arange(0, WIDTH)
    values = tl.load(embedding + token * width + k, mask=k < width, other=0.0)
    at = row.to(tl.int64) * ld + k
    tl.store(x + at, values.to(tl.float32), mask=k < width)
    tl.store(low + at, values.to(low.dtype.element_ty), mask=k < width)


@triton.jit
def keep_kernel(x, slots, features, ld, ld_features, width, WIDTH: tl.constexpr):
    """States beside the cache entries of their rows."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    k = tl.arange(0, WIDTH)
    values = tl.load(x + row.to(tl.int64) * ld + k, mask=k < width)
    tl.store(features + slot * ld_features + k, values, mask=k < width)


PARTIAL = 32 << 20
"""Numbers that partial results may take."""


class Partials:
    """Room for the partial results of blocks."""

    def __init__(self, device: torch.device) -> None:
        self.mixed = torch.zeros(PARTIAL, dtype=torch.float32, device=device)
        self.sums = torch.zeros(PARTIAL // 8, dtype=torch.float32, device=device)
        self.tickets = torch.zeros(1 << 16, dtype=torch.int32, device=device)


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    words: torch.Tensor,
    limits: torch.Tensor,
    positions: torch.Tensor,
    room: Partials,
    *,
    heads: int,
    kv_heads: int,
    head: int,
    wide: int,
    window: int | None,
    header: int,
    rows: int,
    programs: int,
    shared: bool,
    page_size: int,
    pdl: bool,
) -> None:
    """One layer's attention, as described by `words`; `rows` query rows to a tile."""
    extra = {"launch_pdl": True} if pdl else {}
    attention_kernel[(programs,)](
        queries, keys, values, out, words, limits, positions, room.mixed, room.sums, room.tickets,
        head**-0.5 * 1.4426950408889634, 1 << 30 if window is None else window, header,
        GROUP=heads // kv_heads, HEADS=heads, KV_HEADS=kv_heads, WIDE=wide,
        BQ=rows, KEYS=KEYS, LEVELS=KEYS.bit_length() - 1, PAGE=page_size,
        PROGRAMS=programs, SHARED=shared, PDL=pdl,
        num_warps=4 if rows <= 64 else 8, num_stages=2, enable_fp_fusion=False, **extra,
    )  # fmt: skip
