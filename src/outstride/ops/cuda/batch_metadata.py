"""The metadata of one pass, put together on the host: rows, and the work items of attention.

Fields and their order are in `metadata`. An item is a run of KV blocks for a tile of queries.

Queries of an ordinary sequence (no KV missing, a chain of nodes) find their keys through the pages, up
to their limit. Where other nodes follow a plain context, several share a tile for the blocks that hold
context alone; the blocks after those are listed slot by slot for each node, because siblings stand at
the same position. Any other query has a tile of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from outstride.core.graph import IntArray
from outstride.ops.cuda.metadata import (
    BLOCK_KEYS,
    HEADER_SIZE,
    ITEM_SIZE,
    MAX_HEAD_ROWS,
    NUM_ROW_FIELDS,
    PAGED,
    SAME_LIMIT,
    SAMPLING_SIZE,
    Int32Array,
    ItemField,
    RowField,
    TileField,
    item_table,
    num_live,
    row_table,
)

MANY_QUERIES = 256
"""Query rows of one sequence above which tiles are large."""
SEVERAL_QUERIES = 64
"""From this many on tiles are large, too, if small ones would read keys too often: below, reading them
several times costs less than waiting for a large tile."""
SMALL_TILE, LARGE_TILE = 16, 64
"""Query rows of a tile."""
DEEP = 3
"""From this many blocks to a program on, small tiles are given fewer warps."""


class ProgramLoad(Enum):
    """How much a program of attention does one after the other."""

    ONCE = 0
    """One item at most, of a few blocks."""
    SOME = 1
    DEEP = 2
    """Many blocks."""


@dataclass(frozen=True, slots=True)
class AttentionGeometry:
    """What metadata depends on besides the spans.

    group: query heads to a KV head.
    head_width: the padded size of a head.
    spare_slot: the slot to which padding rows write.
    programs: how many programs fill the GPU.
    max_partials: query rows of partial results for which there is space, for each KV head.
    """

    group: int
    kv_heads: int
    head_width: int
    page_size: int
    spare_slot: int
    programs: int
    max_partials: int

    @property
    def staging_page(self) -> int:
        """The first of the pages that belong to no sequence (see `run_ahead`)."""
        return self.spare_slot // self.page_size + 1

    def tile(self, longest: int, end: int = 0) -> int:
        """Query rows of a tile, if the longest chain has `longest` nodes and none ends after `end`."""
        tile = SMALL_TILE
        while tile < self.group:
            tile *= 2
        rows = longest * self.group
        reads = -(-rows // tile) * self.kv_heads * -(-end // BLOCK_KEYS)
        if rows > MANY_QUERIES or (rows >= SEVERAL_QUERIES and reads > 2 * self.programs):
            tile = max(tile, LARGE_TILE)
        return tile


@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """The metadata of a pass, and what its kernels must know at launch."""

    words: Int32Array
    rows: int
    """Padded."""
    tile: int
    """Query rows of a tile."""
    paged: bool
    """Whether all keys are found through pages."""
    windows: tuple[int, ...]
    """Where the items of each attention window begin."""
    splits: bool
    """Whether some tile's blocks are shared out to several programs."""
    programs: int
    """Programs of attention."""
    load: ProgramLoad
    lists_at: int
    """Where the items of the last window end and the lists begin."""
    pages_at: int
    """Where the pages begin."""

    @property
    def max_head_rows(self) -> int:
        """How many rows can reach the LM head."""
        return min(self.rows, MAX_HEAD_ROWS)

    @property
    def head_at(self) -> int:
        """Where the rows that reach the LM head are named."""
        return HEADER_SIZE + NUM_ROW_FIELDS * self.rows

    @property
    def sampling_at(self) -> int:
        """Where their sampling records begin."""
        return self.head_at + self.max_head_rows

    def set_head_rows(self, rows: IntArray | Sequence[int]) -> Int32Array:
        """Names the rows that reach the LM head; returns their sampling records, a view."""
        count, at = len(rows), self.sampling_at
        self.words[self.head_at : self.head_at + count] = rows
        return self.words[at : at + count * SAMPLING_SIZE].reshape(count, SAMPLING_SIZE)

    def live_items(self) -> Int32Array:
        """The items of the only window: a view."""
        items = item_table(self.words[self.windows[0] : self.lists_at])
        return items[: num_live(items)]


def in_lists(at: int) -> int:
    """A place among the lists, marked as one: it moves when the metadata is put together."""
    return -2 - at


def assemble(
    tokens: IntArray,
    positions: IntArray,
    slots: IntArray,
    tiles: Sequence[IntArray],
    pages: Int32Array,
    lists: Int32Array,
    rows: int,
    tile: int,
    geometry: AttentionGeometry,
) -> BatchMetadata:
    """The metadata of a pass, from its rows and the tiles [tiles, TILE_SIZE] of each window."""
    count = len(tokens)
    splits = _should_split(tiles, geometry, geometry.max_partials // tile)
    starts, windows = [], []
    at = HEADER_SIZE + NUM_ROW_FIELDS * rows + min(rows, MAX_HEAD_ROWS) * (1 + SAMPLING_SIZE)
    for i, found in enumerate(tiles):
        items = _items(found, geometry, splits, last=i == len(tiles) - 1)
        windows.append(items)
        starts.append(at)
        at += items.size
    pages_at = at + len(lists)
    words = np.zeros(pages_at + len(pages), dtype=np.int32)
    table = row_table(words, rows)
    table[RowField.TOKEN, :count], table[RowField.POSITION, :count] = tokens, positions
    table[RowField.SLOT, :count], table[RowField.SLOT, count:] = slots, geometry.spare_slot
    words[pages_at:] = pages
    if len(lists):
        words[at:pages_at] = np.where(lists < -1, at + in_lists(0) - lists, lists)
    for start, items in zip(starts, windows, strict=True):
        items[:, ItemField.PAGES] += pages_at
        if len(lists):
            items[items[:, ItemField.BLOCK_LIST] >= 0, ItemField.BLOCK_LIST] += at
        words[start : start + items.size] = items.reshape(-1)
    busiest = max(num_live(items) for items in windows) * geometry.kv_heads
    doubled = busiest > geometry.programs and any(map(shares_keys, tiles))
    programs = geometry.programs * (2 if doubled else 1)
    runs = [items[:, ItemField.STOP_BLOCK] - items[:, ItemField.START_BLOCK] for items in windows]
    deep = max(int(run.max()) for run in runs) >= DEEP
    some = ProgramLoad.ONCE if busiest <= programs else ProgramLoad.SOME
    same_limit = any(bool((t[:, TileField.BLOCK_LIST] == SAME_LIMIT).any()) for t in tiles)
    return BatchMetadata(
        words=words,
        rows=rows,
        tile=tile,
        paged=not len(lists) and not same_limit,
        windows=tuple(starts),
        splits=splits,
        programs=programs,
        load=ProgramLoad.DEEP if deep else some,
        lists_at=at,
        pages_at=pages_at,
    )


def shares_keys(tiles: IntArray) -> bool:
    """Whether the nodes of some tile share a part of their keys, but not all."""
    return bool((tiles[:, TileField.SHARED_STOP] < tiles[:, TileField.STOP_BLOCK]).any())


def fits(tiles: Sequence[IntArray], max_blocks: int) -> bool:
    """Whether there is space for the partial results of all blocks."""
    return all(int(_num_blocks(found).sum()) <= max_blocks for found in tiles)


def _num_blocks(tiles: IntArray) -> IntArray:
    blocks: IntArray = tiles[:, TileField.STOP_BLOCK] - tiles[:, TileField.START_BLOCK]
    return blocks


def _should_split(tiles: Sequence[IntArray], geometry: AttentionGeometry, max_blocks: int) -> bool:
    """Whether several programs take one tile's blocks: if all others would wait for it."""
    if not fits(tiles, max_blocks):
        return False
    split = False
    for found in tiles:
        sizes = _num_blocks(found)
        share = max(1, int(sizes.sum()) * geometry.kv_heads // geometry.programs)
        split |= int(sizes.max()) > 2 * share or shares_keys(found)
    return split


def _runs(
    tiles: IntArray, geometry: AttentionGeometry, splits: bool
) -> tuple[IntArray, IntArray, IntArray]:
    """Runs of the blocks that a tile's nodes share: of which tile, from where, to where."""
    begins, ends = tiles[:, TileField.START_BLOCK], tiles[:, TileField.SHARED_STOP]
    if not splits:
        return np.arange(len(tiles)), begins, ends
    sizes = ends - begins
    own = ((tiles[:, TileField.STOP_BLOCK] - ends) * tiles[:, TileField.NUM_NODES]).sum()
    share = max(1, -(-int(sizes.sum() + own) * geometry.kv_heads // geometry.programs))
    per = np.maximum(-(-sizes // np.maximum(-(-sizes // share), 1)), 1)
    runs = -(-sizes // per)
    which = np.repeat(np.arange(len(tiles)), runs)
    nth = np.arange(len(which)) - (np.cumsum(runs) - runs)[which]
    starts = begins[which] + nth * per[which]
    return which, starts, np.minimum(starts + per[which], ends[which])


def _items(tiles: IntArray, geometry: AttentionGeometry, splits: bool, last: bool) -> Int32Array:
    """Items [items, ITEM_SIZE]: as many as fill the GPU, each tile's in order, then empty ones."""
    which, starts, stops = _runs(tiles, geometry, splits)
    first, nodes = np.zeros_like(which), tiles[which, TileField.NUM_NODES]
    lists = tiles[which, TileField.BLOCK_LIST]
    sharing = np.flatnonzero(tiles[:, TileField.SHARED_STOP] < tiles[:, TileField.STOP_BLOCK])
    if len(sharing):  # further items for the blocks that each node has to itself
        owner = np.repeat(sharing, tiles[sharing, TileField.NUM_NODES])
        nth = np.arange(len(owner)) - np.searchsorted(owner, owner)
        own, stop = tiles[owner, TileField.SHARED_STOP], tiles[owner, TileField.STOP_BLOCK]
        which, starts = np.concatenate([which, owner]), np.concatenate([starts, own])
        stops, first = np.concatenate([stops, stop]), np.concatenate([first, nth])
        nodes = np.concatenate([nodes, np.ones_like(owner)])
        lists = np.concatenate([lists, tiles[owner, TileField.OWN_LISTS] + nth * (stop - own)])
    sizes = _num_blocks(tiles)
    programs = geometry.programs * (2 if len(sharing) else 1)
    size = len(which) + -(-programs // geometry.kv_heads) + 1
    if not last:
        size = 1 << size.bit_length()  # few sizes: CUDA graphs hold where the next items begin
    items = np.zeros((size, ITEM_SIZE), dtype=np.int32)
    items[:, ItemField.BLOCK_LIST] = PAGED
    live, of = items[: len(which)], tiles[which]
    live[:, ItemField.FIRST_ROW] = of[:, TileField.FIRST_ROW] + first
    live[:, ItemField.NUM_NODES] = nodes
    live[:, ItemField.PAGES] = of[:, TileField.PAGES]
    live[:, ItemField.BLOCK_LIST] = lists
    live[:, ItemField.START_BLOCK], live[:, ItemField.STOP_BLOCK] = starts, stops
    live[:, ItemField.TILE_START_BLOCK] = of[:, TileField.START_BLOCK]
    live[:, ItemField.TILE_STOP_BLOCK] = of[:, TileField.STOP_BLOCK]
    live[:, ItemField.NUM_RUNS] = np.bincount(which, minlength=len(tiles))[which]
    live[:, ItemField.PARTIALS] = (np.cumsum(sizes) - sizes)[which]
    live[:, ItemField.TILE] = which
    live[:, ItemField.LIMIT] = of[:, TileField.LIMIT]
    live[:, ItemField.POSITION] = of[:, TileField.POSITION]
    live[:, ItemField.TILE_NODE] = first
    live[:, ItemField.TILE_ROW] = of[:, TileField.FIRST_ROW]
    live[:, ItemField.TILE_NODES] = of[:, TileField.NUM_NODES]
    if len(which) > geometry.programs:
        live[:] = live[np.argsort(starts - stops, kind="stable")]
    return items
