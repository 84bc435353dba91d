# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""Moves a pass that assumed a whole chain to be accepted to where its sequence stands."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from outstride.ops.cuda.batch_metadata import BatchMetadata
from outstride.ops.cuda.kernel_metadata import (
    HEADER_CHAIN_POSITION,
    HEADER_ITEMS_START,
    HEADER_MAX_REJECTED,
    HEADER_NUM_ITEMS,
    HEADER_NUM_NODES,
    HEADER_PAGES_START,
    HEADER_SHIFT,
    HEADER_SIZE,
    ITEM_LIMIT,
    ITEM_POSITION,
    ITEM_SIZE,
    ROW_POSITION,
    ROW_SLOT,
    SAMPLING_POSITION,
    SAMPLING_SIZE,
)
from outstride.ops.cuda.run_ahead.draft_ahead import MAX_ITEMS

_MAX_ITEMS = tl.constexpr(MAX_ITEMS)


@triton.jit
def _add(at, amount, inside):
    """Adds to some words."""
    tl.store(at, tl.load(at, mask=inside, other=0) + amount, mask=inside)


@triton.jit
def realign_kernel(
    words, best, drafted, state, sampling,
    ROWS: tl.constexpr, PAGE: tl.constexpr, DRAFT: tl.constexpr,
):  # fmt: skip
    """Moves the metadata of a pass to where the sequence stands, and enters its tokens.

    DRAFT: it is the draft head's pass. The number of accepted tokens is found by comparing what was
    `drafted` with the tokens that the target sampled (`best`). It is kept in `state` for the target's
    pass after it, by which time something else is drafted.
    """
    line = tl.arange(0, ROWS)
    nodes, rejected = tl.load(words + HEADER_NUM_NODES), tl.load(words + HEADER_MAX_REJECTED)
    if DRAFT:
        wrong = (line < rejected) & (
            tl.load(drafted + line, mask=line < rejected, other=0)
            != tl.load(best + line, mask=line < rejected, other=0)
        )
        accepted = tl.min(tl.where(wrong, line, rejected), axis=0)
        root = tl.load(best + accepted)
        tl.store(state, accepted)
        tl.store(state + 1, root)
        tokens = tl.load(words + HEADER_SIZE + line)
    else:
        accepted, root = tl.load(state), tl.load(state + 1)
        tokens = tl.load(drafted + line - 1, mask=(line > 0) & (line < nodes), other=0)
    move = accepted - rejected + tl.load(words + HEADER_SHIFT)
    if DRAFT:
        at = words + HEADER_CHAIN_POSITION
        tl.store(at, tl.load(at) + move)
    ours = line < nodes
    tl.store(words + HEADER_SIZE + line, tl.where(line == 0, root, tokens), mask=ours)
    positions = words + HEADER_SIZE + ROW_POSITION * ROWS + line
    position = tl.load(positions) + move
    tl.store(positions, position, mask=ours)
    pages = words + tl.load(words + HEADER_PAGES_START)
    page = tl.load(pages + position // PAGE, mask=ours, other=0)
    slots = words + HEADER_SIZE + ROW_SLOT * ROWS + line
    tl.store(slots, page * PAGE + position % PAGE, mask=ours)
    _add(sampling + line * SAMPLING_SIZE + SAMPLING_POSITION, move, ours)
    k = tl.arange(0, _MAX_ITEMS)
    item = words + tl.load(words + HEADER_ITEMS_START) + k * ITEM_SIZE
    inside = k < tl.load(words + HEADER_NUM_ITEMS)
    _add(item + ITEM_LIMIT, move, inside)
    _add(item + ITEM_POSITION, move, inside)


def realign(
    words: torch.Tensor,
    best: torch.Tensor,
    drafted: torch.Tensor,
    state: torch.Tensor,
    metadata: BatchMetadata,
    page_size: int,
    *,
    draft: bool,
) -> None:
    """Launches `realign_kernel` on the metadata of a pass that is on the GPU."""
    realign_kernel[(1,)](
        words, best, drafted, state, words[metadata.sampling_at :],
        ROWS=metadata.rows, PAGE=page_size, DRAFT=draft, num_warps=4,
    )  # fmt: skip
