# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention over pages and token graphs, reduced over logical positions.

Keys stand in blocks of 128 by position, whichever slots hold them. Each block yields a partial result
that depends on its keys alone; partial results are folded in order of blocks, by one program that
walks through them, by the last of several that each took some, or by a kernel of its own. Which of
them, and how many queries share a tile, changes no bit. Blocks that a query does not see at all change
nothing, either.
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

from outstride.ops.cuda.layout import FIELDS, KEYS, LARGE_TILE, LEVEL, Pace
from outstride.ops.cuda.steps import CHOSEN

_FLOOR = tl.constexpr(-1e30)
"""Stands in for the maximum of a block in which a query sees nothing."""
_FIELDS = tl.constexpr(FIELDS)
_CHOSEN = tl.constexpr(CHOSEN)
_LEVEL = tl.constexpr(LEVEL)


@triton.jit
def _fold(peak, total, mixed, new_peak, new_total, new_mixed):
    """One more block."""
    top = tl.maximum(peak, new_peak)
    old, new = tl.exp2(peak - top), tl.exp2(new_peak - top)
    total = total * old + new_total * new
    mixed = mixed * old[:, None] + new_mixed * new[:, None]
    return top, total, mixed


@triton.jit
def _partial(partial, peaks, sums, spot, there, line, BQ: tl.constexpr, WIDE: tl.constexpr):
    """One block's partial result, if there is one: else what changes nothing."""
    peak = tl.load(peaks + spot * BQ + line, mask=there, other=_FLOOR, cache_modifier=".cg")
    total = tl.load(sums + spot * BQ + line, mask=there, other=0.0, cache_modifier=".cg")
    at = spot * (BQ * WIDE) + line[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    mixed = tl.load(partial + at, mask=there[:, None], other=0.0, cache_modifier=".cg")
    return peak, total, mixed


@triton.jit
def _fold_all(peak, total, mixed, partial, peaks, sums, base, count, head, line, live,
              KV_HEADS: tl.constexpr, BQ: tl.constexpr, WIDE: tl.constexpr,
              FOLDS: tl.constexpr):  # fmt: skip
    """The partial results of `count` blocks: some are asked for at once, then folded in order."""
    for block in tl.range(0, count, FOLDS, num_stages=1):
        found = ()
        for i in tl.static_range(FOLDS):
            spot = ((base + block + i) * KV_HEADS + head).to(tl.int64)
            there = live & (block + i < count)
            found += (_partial(partial, peaks, sums, spot, there, line, BQ, WIDE),)  # type: ignore[assignment]
        for i in tl.static_range(FOLDS):
            new_peak, new_total, new_mixed = found[i]  # type: ignore[var-annotated]
            peak, total, mixed = _fold(peak, total, mixed, new_peak, new_total, new_mixed)
    return peak, total, mixed


@triton.jit
def _store(out, mixed, total, row, live, of_head, ld_out, BQ: tl.constexpr, WIDE: tl.constexpr):
    """What a tile's queries mixed, divided by their weights."""
    sums = tl.maximum(total, 1e-30)
    result = tl.math.div_rn(mixed, tl.broadcast_to(sums[:, None], (BQ, WIDE)))
    at = (row.to(tl.int64) * ld_out + of_head)[:, None] + tl.arange(0, WIDE)[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=live[:, None])


@triton.jit
def _find(words, item, block, KEYS: tl.constexpr, PAGE: tl.constexpr, SHARED: tl.constexpr):
    """The slots of a block's keys, which of them there are, and whether pages told."""
    pages_at, blocks_at = tl.load(item + 2), tl.load(item + 3)
    more = tl.load(item + 1) - 1
    if not SHARED:
        more = tl.where(blocks_at == _LEVEL, 0, more)
    lane = tl.arange(0, KEYS)
    place = block * KEYS + lane
    known = place < tl.load(item + 11) + more
    paged = blocks_at < 0
    if SHARED:
        page = tl.load(words + pages_at + place // PAGE, mask=known, other=0)
        slot = page * PAGE + place % PAGE
    else:
        listed_at = tl.load(words + blocks_at + block, mask=blocks_at >= 0, other=-1)
        paged = listed_at < 0
        known = known & paged
        page = tl.load(words + pages_at + place // PAGE, mask=known, other=0)
        listed = tl.load(words + listed_at + lane, mask=(lane >= 0) & ~paged, other=-1)
        slot = tl.where(paged, page * PAGE + place % PAGE, listed)
        known = known | (listed >= 0)
    return tl.where(known, slot, 0), known, paged


@triton.jit
def _where(item):
    """An item's first row and its run of blocks, and the first block of its tile."""
    return tl.load(item), tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)


@triton.jit
def attention_kernel(
    queries, keys, values, out, items, words, partial, partial_peaks, partial_sums, tickets,
    scale, window, ld_out,
    GROUP: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDE: tl.constexpr,
    BQ: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr, PROGRAMS: tl.constexpr,
    SHARED: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, FOLDS: tl.constexpr,
    APART: tl.constexpr, ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`words` describes the pass, `items` is the part of it with this window's items.

    The sums of weights are products with ones: sixteen equal columns, because products have no fewer.
    What the words say is read before the kernel waits for the one before it.
    APART: partial results are left to `fold_kernel`. ONCE: no program has a second item.
    """
    lane = tl.arange(0, KEYS)
    dims = tl.arange(0, WIDE)
    line = tl.arange(0, BQ)
    ones = tl.full((KEYS, 16), 1.0, dtype=queries.dtype.element_ty)
    early: tl.constexpr = STAGES == 1
    work = tl.program_id(0)
    item = items + work // KV_HEADS * _FIELDS
    nodes = tl.load(item + 1)
    row_at, start, stop, first = _where(item)
    base, top, place_at = tl.load(item + 9), tl.load(item + 11), tl.load(item + 12)
    slot, known, paged = _find(words, item, start, KEYS, PAGE, SHARED)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    while nodes > 0:
        head = work % KV_HEADS
        node = tl.minimum(line // GROUP, nodes - 1)
        live = line // GROUP < nodes
        limit = top + node
        floor = place_at + node - window
        to = line
        if not SHARED:
            to = line + tl.load(item + 13) * GROUP
            limit = tl.where(tl.load(item + 3) == _LEVEL, limit - node, limit)
        row = row_at + node
        of_head = (head * GROUP + line % GROUP) * WIDE
        at = row.to(tl.int64) * (HEADS * WIDE) + of_head
        query = tl.load(queries + at[:, None] + dims[None, :], mask=live[:, None], other=0.0)
        peak = tl.full((BQ,), _FLOOR, dtype=tl.float32)
        total = tl.zeros((BQ,), dtype=tl.float32)
        mixed = tl.zeros((BQ, WIDE), dtype=tl.float32)
        for block in tl.range(start, stop, num_stages=STAGES):
            if not early:
                slot, known, paged = _find(words, item, block, KEYS, PAGE, SHARED)
            place = block * KEYS + lane
            seen = place[None, :] < limit[:, None]
            if not SHARED:
                seen = known[None, :] & (seen | ~paged)
            seen = seen & live[:, None] & (place[None, :] > floor[:, None])
            entry = slot[:, None].to(tl.int64) * (KV_HEADS * WIDE) + head * WIDE + dims[None, :]
            key = tl.load(keys + entry, mask=known[:, None], other=0.0)
            value = tl.load(values + entry, mask=known[:, None], other=0.0)
            if early:
                slot, known, paged = _find(
                    words, item, tl.minimum(block + 1, stop - 1), KEYS, PAGE, SHARED
                )
            scores = tl.dot(query, tl.trans(key)) * scale
            scores = tl.where(seen, scores, float("-inf"))
            new_peak = tl.maximum(tl.max(scores, axis=1), _FLOOR)
            weights = tl.exp2(scores - new_peak[:, None]).to(value.dtype)
            new_total = tl.max(tl.dot(weights, ones), axis=1)
            new_mixed = tl.dot(weights, value)
            if SPLITS:
                spot = ((base + block - first) * KV_HEADS + head).to(tl.int64)
                ours = line >= 0
                if not SHARED:  # other lines may be those of other programs
                    ours = live
                tl.store(partial_peaks + spot * BQ + to, new_peak, mask=ours)
                tl.store(partial_sums + spot * BQ + to, new_total, mask=ours)
                at_mixed = spot * (BQ * WIDE) + to[:, None] * WIDE + dims[None, :]
                tl.store(partial + at_mixed, new_mixed, mask=ours[:, None])
            else:
                peak, total, mixed = _fold(peak, total, mixed, new_peak, new_total, new_mixed)
        done = not APART
        if SPLITS and not APART:
            tl.debug_barrier()
            mine = tickets + tl.load(item + 10) * KV_HEADS + head
            pieces = tl.load(item + 8)
            done = tl.atomic_add(mine, 1, sem="acq_rel", scope="gpu") == pieces - 1
            if done:
                if not SHARED:  # all nodes of the tile, not only those of this item
                    nodes = tl.load(item + 15)
                    node = tl.minimum(line // GROUP, nodes - 1)
                    live, row = line // GROUP < nodes, tl.load(item + 14) + node
                count = tl.load(item + 7) - first
                peak, total, mixed = _fold_all(peak, total, mixed, partial, partial_peaks,
                                               partial_sums, base, count, head, line, live,
                                               KV_HEADS, BQ, WIDE, FOLDS)  # fmt: skip
                tl.store(mine, 0)
        if done:
            _store(out, mixed, total, row, live, of_head, ld_out, BQ, WIDE)
        if ONCE:
            nodes *= 0
        else:
            work += PROGRAMS
            item = items + work // KV_HEADS * _FIELDS
            nodes = tl.load(item + 1)
            row_at, start, stop, first = _where(item)
            base, top, place_at = tl.load(item + 9), tl.load(item + 11), tl.load(item + 12)
            if early:
                slot, known, paged = _find(words, item, start, KEYS, PAGE, SHARED)


@triton.jit
def fold_kernel(
    out, items, partial, partial_peaks, partial_sums, ld_out,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, WIDE: tl.constexpr, BQ: tl.constexpr,
    SLICE: tl.constexpr, PROGRAMS: tl.constexpr, FOLDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Folds what the programs of each tile left behind; its lines are shared out to programs.

    The next kernel may start at once: it waits for this one, which waits for the one before.
    """
    slices: tl.constexpr = BQ // SLICE
    work = tl.program_id(0)
    part = work % slices * SLICE
    line = part + tl.arange(0, SLICE)
    work //= slices
    item = items + work // KV_HEADS * _FIELDS
    nodes = tl.load(item + 1)
    row_at, start, _, first = _where(item)
    base, count = tl.load(item + 9), tl.load(item + 7) - first
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    while nodes > 0:
        if (start == first) & (part < nodes * GROUP):  # a tile's first run stands for it
            head = work % KV_HEADS
            live = line // GROUP < nodes
            row = row_at + tl.minimum(line // GROUP, nodes - 1)
            peak = tl.full((SLICE,), _FLOOR, dtype=tl.float32)
            total = tl.zeros((SLICE,), dtype=tl.float32)
            mixed = tl.zeros((SLICE, WIDE), dtype=tl.float32)
            peak, total, mixed = _fold_all(peak, total, mixed, partial, partial_peaks,
                                           partial_sums, base, count, head, line, live,
                                           KV_HEADS, BQ, WIDE, FOLDS)  # fmt: skip
            of_head = (head * GROUP + line % GROUP) * WIDE
            _store(out, mixed, total, row, live, of_head, ld_out, SLICE, WIDE)
        work += PROGRAMS
        item = items + work // KV_HEADS * _FIELDS
        nodes = tl.load(item + 1)
        row_at, start, _, first = _where(item)
        base, count = tl.load(item + 9), tl.load(item + 7) - first


@triton.jit
def embed_kernel(tokens, best, embedding, x, low, ld, width, WIDTH: tl.constexpr):
    """Rows of the embedding as states, in both formats; see `steps.CHOSEN` for negative tokens."""
    row = tl.program_id(0)
    token = tl.load(tokens + row)
    if token <= _CHOSEN:
        token = tl.load(best + (_CHOSEN - token))
    token = token.to(tl.int64)
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


SLICE = 16
"""Lines of a tile that a program of `fold_kernel` takes."""
PARTIAL = 32 << 20
"""Numbers that partial results may take."""


class Partials:
    """Room for the partial results of blocks."""

    def __init__(self, device: torch.device) -> None:
        self.mixed = torch.zeros(PARTIAL, dtype=torch.float32, device=device)
        self.peaks = torch.zeros(PARTIAL // 16, dtype=torch.float32, device=device)
        self.sums = torch.zeros(PARTIAL // 16, dtype=torch.float32, device=device)
        self.tickets = torch.zeros(1 << 16, dtype=torch.int32, device=device)


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    items: torch.Tensor,
    words: torch.Tensor,
    room: Partials,
    *,
    heads: int,
    kv_heads: int,
    head: int,
    wide: int,
    window: int | None,
    rows: int,
    programs: int,
    shared: bool,
    splits: bool,
    deep: Pace,
    page_size: int,
    pdl: bool,
) -> None:
    """One layer's attention, as described by `words`; `rows` query rows to a tile."""
    extra = {"launch_pdl": True} if pdl else {}
    large = rows >= LARGE_TILE
    apart = large and splits and shared
    warps = 4 if apart or (large and not splits) or (not large and deep is Pace.DEEP) else 8
    folds = 2 if large else 5 if wide <= 64 else 9
    common: dict[str, Any] = {
        "GROUP": heads // kv_heads, "KV_HEADS": kv_heads, "WIDE": wide, "BQ": rows,
        "PROGRAMS": programs, "PDL": pdl, "enable_fp_fusion": False, **extra,
    }  # fmt: skip
    left = room.mixed, room.peaks, room.sums
    attention_kernel[(programs,)](
        queries, keys, values, out, items, words, *left, room.tickets,
        head**-0.5 * 1.4426950408889634, 1 << 30 if window is None else window, out.stride(0),
        HEADS=heads, KEYS=KEYS, PAGE=page_size, SHARED=shared, SPLITS=splits,
        STAGES=1 if splits and (apart or not large) else 2, FOLDS=folds, APART=apart,
        ONCE=deep is Pace.ONCE, num_warps=warps, **common,
    )  # fmt: skip
    if apart:
        slices = rows // SLICE
        fold_kernel[(programs * slices,)](
            out, items, *left, out.stride(0), SLICE=SLICE, FOLDS=9, num_warps=4, **common
        )  # fmt: skip
