# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention over a paged KV cache and token graphs, reduced over logical positions.

Keys are grouped in blocks of 128 by position, whichever slots hold them. Each block gives a partial
result that depends on its keys alone. Partial results are folded in order of blocks: by one program
that walks through them, by the last of several programs that each took some, or by `fold_kernel`.
Which of these runs, and how many queries share a tile, changes no bit. Blocks that a query does not
see change nothing either.
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

from outstride.ops.cuda.batch_metadata import LARGE_TILE, ProgramLoad
from outstride.ops.cuda.kernel_metadata import (
    ITEM_BLOCK_LIST,
    ITEM_FIRST_ROW,
    ITEM_LIMIT,
    ITEM_NUM_NODES,
    ITEM_NUM_RUNS,
    ITEM_PAGES,
    ITEM_PARTIALS,
    ITEM_POSITION,
    ITEM_SIZE,
    ITEM_START_BLOCK,
    ITEM_STOP_BLOCK,
    ITEM_TILE,
    ITEM_TILE_NODE,
    ITEM_TILE_NODES,
    ITEM_TILE_ROW,
    ITEM_TILE_START_BLOCK,
    ITEM_TILE_STOP_BLOCK,
    PREVIOUS_TOKEN,
    SAME_LIMIT,
)
from outstride.ops.cuda.metadata import BLOCK_KEYS

_FLOOR = tl.constexpr(-1e30)
"""The maximum of a block in which a query sees no key."""


@triton.jit
def _fold(peak, total, mixed, new_peak, new_total, new_mixed):
    """Adds the partial result of one more block."""
    top = tl.maximum(peak, new_peak)
    old, new = tl.exp2(peak - top), tl.exp2(new_peak - top)
    total = total * old + new_total * new
    mixed = mixed * old[:, None] + new_mixed * new[:, None]
    return top, total, mixed


@triton.jit
def _partial(partial, peaks, sums, spot, there, line, BQ: tl.constexpr, WIDE: tl.constexpr):
    """One block's partial result: peak [BQ], sum [BQ], mixed [BQ, WIDE]; neutral where not `there`."""
    peak = tl.load(peaks + spot * BQ + line, mask=there, other=_FLOOR, cache_modifier=".cg")
    total = tl.load(sums + spot * BQ + line, mask=there, other=0.0, cache_modifier=".cg")
    at = spot * (BQ * WIDE) + line[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    mixed = tl.load(partial + at, mask=there[:, None], other=0.0, cache_modifier=".cg")
    return peak, total, mixed


@triton.jit
def _fold_all(peak, total, mixed, partial, peaks, sums, base, count, head, line, live,
              KV_HEADS: tl.constexpr, BQ: tl.constexpr, WIDE: tl.constexpr,
              FOLDS: tl.constexpr):  # fmt: skip
    """Folds `count` blocks in order; FOLDS of them are loaded at once."""
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
    """Divides what a tile's queries mixed [BQ, WIDE] by their weights [BQ], and stores it."""
    sums = tl.maximum(total, 1e-30)
    result = tl.math.div_rn(mixed, tl.broadcast_to(sums[:, None], (BQ, WIDE)))
    at = (row.to(tl.int64) * ld_out + of_head)[:, None] + tl.arange(0, WIDE)[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=live[:, None])


@triton.jit
def _find(words, item, block, BLOCK_KEYS: tl.constexpr, PAGE: tl.constexpr, SHARED: tl.constexpr):
    """The slots of a block's keys [KEYS], which of them exist, and whether pages gave them."""
    pages_at, blocks_at = tl.load(item + ITEM_PAGES), tl.load(item + ITEM_BLOCK_LIST)
    more = tl.load(item + ITEM_NUM_NODES) - 1
    if not SHARED:
        more = tl.where(blocks_at == SAME_LIMIT, 0, more)
    lane = tl.arange(0, BLOCK_KEYS)
    place = block * BLOCK_KEYS + lane
    known = place < tl.load(item + ITEM_LIMIT) + more
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
def _run_of(item):
    """An item's first row, its run of blocks, and the first block of its tile."""
    return (
        tl.load(item + ITEM_FIRST_ROW),
        tl.load(item + ITEM_START_BLOCK),
        tl.load(item + ITEM_STOP_BLOCK),
        tl.load(item + ITEM_TILE_START_BLOCK),
    )


@triton.jit
def _place_of(item):
    """Where an item's partial results begin, its limit of positions, its first node's position."""
    return tl.load(item + ITEM_PARTIALS), tl.load(item + ITEM_LIMIT), tl.load(item + ITEM_POSITION)


@triton.jit
def attention_kernel(
    queries, keys, values, out, items, words, partial, partial_peaks, partial_sums, counters,
    scale, window, ld_out,
    GROUP: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDE: tl.constexpr,
    BQ: tl.constexpr, BLOCK_KEYS: tl.constexpr, PAGE: tl.constexpr, PROGRAMS: tl.constexpr,
    SHARED: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, FOLDS: tl.constexpr,
    APART: tl.constexpr, ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of one layer. `words` is the metadata of the pass, `items` this window's part of it.

    queries [rows, HEADS, WIDE], keys and values [slots, KV_HEADS, WIDE], out [rows, ld_out].
    Sums of weights are products with sixteen equal columns of ones: products have no fewer columns.
    Metadata is read before the kernel waits for the one before it, which does not write it.
    APART: partial results are left to `fold_kernel`. ONCE: no program has a second item.
    """
    lane = tl.arange(0, BLOCK_KEYS)
    dims = tl.arange(0, WIDE)
    line = tl.arange(0, BQ)
    ones = tl.full((BLOCK_KEYS, 16), 1.0, dtype=queries.dtype.element_ty)
    early: tl.constexpr = STAGES == 1
    work = tl.program_id(0)
    item = items + work // KV_HEADS * ITEM_SIZE
    nodes = tl.load(item + ITEM_NUM_NODES)
    row_at, start, stop, first = _run_of(item)
    base, top, place_at = _place_of(item)
    slot, known, paged = _find(words, item, start, BLOCK_KEYS, PAGE, SHARED)
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
            to = line + tl.load(item + ITEM_TILE_NODE) * GROUP
            limit = tl.where(tl.load(item + ITEM_BLOCK_LIST) == SAME_LIMIT, limit - node, limit)
        row = row_at + node
        of_head = (head * GROUP + line % GROUP) * WIDE
        at = row.to(tl.int64) * (HEADS * WIDE) + of_head
        query = tl.load(queries + at[:, None] + dims[None, :], mask=live[:, None], other=0.0)
        peak = tl.full((BQ,), _FLOOR, dtype=tl.float32)
        total = tl.zeros((BQ,), dtype=tl.float32)
        mixed = tl.zeros((BQ, WIDE), dtype=tl.float32)
        for block in tl.range(start, stop, num_stages=STAGES):
            if not early:
                slot, known, paged = _find(words, item, block, BLOCK_KEYS, PAGE, SHARED)
            place = block * BLOCK_KEYS + lane
            seen = place[None, :] < limit[:, None]
            if not SHARED:
                seen = known[None, :] & (seen | ~paged)
            seen = seen & live[:, None] & (place[None, :] > floor[:, None])
            kv = slot[:, None].to(tl.int64) * (KV_HEADS * WIDE) + head * WIDE + dims[None, :]
            key = tl.load(keys + kv, mask=known[:, None], other=0.0)
            value = tl.load(values + kv, mask=known[:, None], other=0.0)
            if early:
                slot, known, paged = _find(
                    words, item, tl.minimum(block + 1, stop - 1), BLOCK_KEYS, PAGE, SHARED
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
                if not SHARED:  # other lines may belong to other programs
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
            mine = counters + tl.load(item + ITEM_TILE) * KV_HEADS + head
            runs = tl.load(item + ITEM_NUM_RUNS)
            done = tl.atomic_add(mine, 1, sem="acq_rel", scope="gpu") == runs - 1
            if done:
                if not SHARED:  # all nodes of the tile, not only those of this item
                    nodes = tl.load(item + ITEM_TILE_NODES)
                    node = tl.minimum(line // GROUP, nodes - 1)
                    live, row = line // GROUP < nodes, tl.load(item + ITEM_TILE_ROW) + node
                count = tl.load(item + ITEM_TILE_STOP_BLOCK) - first
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
            item = items + work // KV_HEADS * ITEM_SIZE
            nodes = tl.load(item + ITEM_NUM_NODES)
            row_at, start, stop, first = _run_of(item)
            base, top, place_at = _place_of(item)
            if early:
                slot, known, paged = _find(words, item, start, BLOCK_KEYS, PAGE, SHARED)


@triton.jit
def _partials_of(item, first):
    """Where the partial results of an item's tile begin, and how many blocks they are of."""
    return tl.load(item + ITEM_PARTIALS), tl.load(item + ITEM_TILE_STOP_BLOCK) - first


@triton.jit
def fold_kernel(
    out, items, partial, partial_peaks, partial_sums, ld_out,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, WIDE: tl.constexpr, BQ: tl.constexpr,
    SLICE: tl.constexpr, PROGRAMS: tl.constexpr, FOLDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Folds the partial results of each tile; SLICE lines of it to a program.

    The next kernel may start at once: it waits for this one, which waits for the one before.
    """
    slices: tl.constexpr = BQ // SLICE
    work = tl.program_id(0)
    part = work % slices * SLICE
    line = part + tl.arange(0, SLICE)
    work //= slices
    item = items + work // KV_HEADS * ITEM_SIZE
    nodes = tl.load(item + ITEM_NUM_NODES)
    row_at, start, _, first = _run_of(item)
    base, count = _partials_of(item, first)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    while nodes > 0:
        if (start == first) & (part < nodes * GROUP):  # once for each tile: by its first run
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
        item = items + work // KV_HEADS * ITEM_SIZE
        nodes = tl.load(item + ITEM_NUM_NODES)
        row_at, start, _, first = _run_of(item)
        base, count = _partials_of(item, first)


@triton.jit
def embed_kernel(tokens, best, embedding, x, low, ld, width, WIDTH: tl.constexpr):
    """Embedding rows as hidden states, in both formats; see PREVIOUS_TOKEN for negative tokens."""
    row = tl.program_id(0)
    token = tl.load(tokens + row)
    if token <= PREVIOUS_TOKEN:
        token = tl.load(best + (PREVIOUS_TOKEN - token))
    token = token.to(tl.int64)
    k = tl.arange(0, WIDTH)
    values = tl.load(embedding + token * width + k, mask=k < width, other=0.0)
    at = row.to(tl.int64) * ld + k
    tl.store(x + at, values.to(tl.float32), mask=k < width)
    tl.store(low + at, values.to(low.dtype.element_ty), mask=k < width)


@triton.jit
def keep_kernel(x, slots, features, ld, ld_features, width, WIDTH: tl.constexpr):
    """Stores hidden states x [rows, ld] next to the KV of their rows."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    k = tl.arange(0, WIDTH)
    values = tl.load(x + row.to(tl.int64) * ld + k, mask=k < width)
    tl.store(features + slot * ld_features + k, values, mask=k < width)


SLICE = 16
"""Lines of a tile that a program of `fold_kernel` takes."""
PARTIAL = 32 << 20
"""How many floats partial results may take."""


class AttentionPartials:
    """Buffers for the partial results of blocks."""

    def __init__(self, device: torch.device) -> None:
        self.mixed = torch.zeros(PARTIAL, dtype=torch.float32, device=device)
        self.peaks = torch.zeros(PARTIAL // 16, dtype=torch.float32, device=device)
        self.sums = torch.zeros(PARTIAL // 16, dtype=torch.float32, device=device)
        self.counters = torch.zeros(1 << 16, dtype=torch.int32, device=device)


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    items: torch.Tensor,
    words: torch.Tensor,
    partials: AttentionPartials,
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
    load: ProgramLoad,
    page_size: int,
    pdl: bool,
) -> None:
    """One layer's attention; `words` is the metadata of the pass, `rows` the query rows of a tile."""
    extra = {"launch_pdl": True} if pdl else {}
    large = rows >= LARGE_TILE
    apart = large and splits and shared
    warps = 4 if apart or (large and not splits) or (not large and load is ProgramLoad.DEEP) else 8
    folds = 2 if large else 5 if wide <= 64 else 9
    common: dict[str, Any] = {
        "GROUP": heads // kv_heads, "KV_HEADS": kv_heads, "WIDE": wide, "BQ": rows,
        "PROGRAMS": programs, "PDL": pdl, "enable_fp_fusion": False, **extra,
    }  # fmt: skip
    left = partials.mixed, partials.peaks, partials.sums
    attention_kernel[(programs,)](
        queries, keys, values, out, items, words, *left, partials.counters,
        head**-0.5 * 1.4426950408889634, 1 << 30 if window is None else window, out.stride(0),
        HEADS=heads, BLOCK_KEYS=BLOCK_KEYS, PAGE=page_size, SHARED=shared, SPLITS=splits,
        STAGES=1 if splits and (apart or not large) else 2, FOLDS=folds, APART=apart,
        ONCE=load is ProgramLoad.ONCE, num_warps=warps, **common,
    )  # fmt: skip
    if apart:
        slices = rows // SLICE
        fold_kernel[(programs * slices,)](
            out, items, *left, out.stride(0), SLICE=SLICE, FOLDS=9, num_warps=4, **common
        )  # fmt: skip
