# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""Moves a pass that was described as if a whole chain had held to where its sequence stands."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from outstride.ops.cuda.chain import PLACE
from outstride.ops.cuda.choose import POSITION
from outstride.ops.cuda.layout import FIELDS, HEADER, PLACES, Layout
from outstride.ops.cuda.relay import ITEMS, ITEMS_AT, MOST, NODES, PAGES_AT, SHIFT, SLACK

_NODES, _ITEMS, _ITEMS_AT = tl.constexpr(NODES), tl.constexpr(ITEMS), tl.constexpr(ITEMS_AT)
_PAGES_AT, _SLACK, _MOST = tl.constexpr(PAGES_AT), tl.constexpr(SLACK), tl.constexpr(MOST)
_HEADER, _FIELDS, _PLACES = tl.constexpr(HEADER), tl.constexpr(FIELDS), tl.constexpr(PLACES)
_POSITION, _PLACE, _SHIFT = tl.constexpr(POSITION), tl.constexpr(PLACE), tl.constexpr(SHIFT)


@triton.jit
def back_kernel(
    words, best, drafted, state, draws,
    ROWS: tl.constexpr, PAGE: tl.constexpr, DRAFT: tl.constexpr,
):  # fmt: skip
    """Moves a described pass to where the sequence stands, and enters its tokens.

    DRAFT: it is the part's. What held is found by comparing what was `drafted` with what the target
    chose, and kept in `state` for the pass behind, by which time something else is drafted.
    """
    line = tl.arange(0, ROWS)
    nodes, slack = tl.load(words + _NODES), tl.load(words + _SLACK)
    if DRAFT:
        wrong = (line < slack) & (
            tl.load(drafted + line, mask=line < slack, other=0)
            != tl.load(best + line, mask=line < slack, other=0)
        )
        held = tl.min(tl.where(wrong, line, slack), axis=0)
        root = tl.load(best + held)
        tl.store(state, held)
        tl.store(state + 1, root)
        tokens = tl.load(words + _HEADER + line)
    else:
        held, root = tl.load(state), tl.load(state + 1)
        tokens = tl.load(drafted + line - 1, mask=(line > 0) & (line < nodes), other=0)
    back = held - slack + tl.load(words + _SHIFT)
    if DRAFT:
        tl.store(words + _PLACE, tl.load(words + _PLACE) + back)
    ours = line < nodes
    tl.store(words + _HEADER + line, tl.where(line == 0, root, tokens), mask=ours)
    place = tl.load(words + _HEADER + ROWS + line) + back
    tl.store(words + _HEADER + ROWS + line, place, mask=ours)
    page = tl.load(words + tl.load(words + _PAGES_AT) + place // PAGE, mask=ours, other=0)
    tl.store(words + _HEADER + 2 * ROWS + line, page * PAGE + place % PAGE, mask=ours)
    at = draws + line * _PLACES + _POSITION
    tl.store(at, tl.load(at, mask=ours, other=0) + back, mask=ours)
    k = tl.arange(0, 2 * _MOST)
    item = words + tl.load(words + _ITEMS_AT) + k // 2 * _FIELDS + 11 + k % 2
    inside = k < 2 * tl.load(words + _ITEMS)
    tl.store(item, tl.load(item, mask=inside, other=0) + back, mask=inside)


def move_back(
    words: torch.Tensor,
    best: torch.Tensor,
    drafted: torch.Tensor,
    state: torch.Tensor,
    layout: Layout,
    page_size: int,
    *,
    draft: bool,
) -> None:
    """See `back_kernel`."""
    back_kernel[(1,)](
        words, best, drafted, state, words[layout.head_at + layout.head_rows :],
        ROWS=layout.rows, PAGE=page_size, DRAFT=draft, num_warps=4,
    )  # fmt: skip
