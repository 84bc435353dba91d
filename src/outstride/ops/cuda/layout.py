"""The description of a pass that goes to the card in one transfer.

Words of 32 bits: a header; for each row its token, position and slot; for each row of the head where
it comes from and its draw; then the items of each window, zeros behind them; then lists of slots, and
pages. An item is a run of key blocks for a tile of queries.

Queries of an ordinary sequence (nothing missing, a chain of nodes) find their keys through the
pages, up to their limit. Where other nodes hang behind plain context, several share a tile for the
blocks that hold context alone; the blocks behind those are listed slot by slot for each node, because
rivals stand at the same position. Any other query has a tile of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from outstride.core.graph import IntArray

KEYS = 128
"""Keys of a block."""
FIELDS = 16
"""Words of an item."""
MOVES = 64
"""So many entries are moved at the beginning of a pass at the most."""
MOVES_AT = 16
HEADER = MOVES_AT + 2 * MOVES
"""Words before those of the rows: where the tokens of the pass are to be put, how many entries are
moved before it, and from MOVES_AT on from where to where."""
ROW_FIELDS = 3
SIZES = (16, 32, 64, 128)
"""Padded numbers of rows for which passes are recorded; larger ones are launched one by one."""
HEAD_ROWS = 128
"""So many rows of the vocabulary exist at once."""
PLACES = 12
"""Words that describe a row's draw."""
BEST = 16
"""So many tokens of a row are chosen on the card at the most."""
LARGE = 256
"""Query rows of one sequence above which tiles are large."""
SEVERAL = 64
"""From so many on they are large, too, if small ones would read keys too often: below, reading them
several times costs less than waiting for a large tile."""
LARGE_TILE = 64
DEEP = 3
"""From so many blocks to a program on, small tiles are given fewer warps."""

COLUMNS = 10

Words = npt.NDArray[np.int32]

_ROW, _NODES, _PAGES, _BLOCKS, _SIZE, _FIRST, _LIMIT, _PLACE, _END, _NEAR = range(COLUMNS)
"""Columns of a tile: its first row, how many nodes it has, where its pages and its list of blocks
begin, the blocks in which its keys end and begin, below which position the first node sees keys (one
more for each further one, if there is no list), the position of the first node, the block up to which
its nodes share their keys, and where the lists of the blocks from there on begin, node by node."""
PAGED, LEVEL = -1, -2
"""Instead of a list of blocks: all are found through pages; the limit is the same for all nodes."""


class Pace(Enum):
    """How much the programs of attention have to do one behind the other."""

    ONCE = 0
    """One item each at the most, of a few blocks."""
    SOME = 1
    DEEP = 2
    """Many blocks."""


@dataclass(frozen=True, slots=True)
class Card:
    """What a description depends on besides the spans.

    spare: the slot to which padding rows write.
    programs: how many fill the card.
    room: words of partial results for each query row of each key head.
    """

    group: int
    kv_heads: int
    wide: int
    page_size: int
    spare: int
    programs: int
    room: int

    def tile(self, longest: int, end: int = 0) -> int:
        """Query rows of a tile, if the longest chain has so many nodes; none ends behind `end`."""
        tile = 16
        while tile < self.group:
            tile *= 2
        rows = longest * self.group
        reads = -(-rows // tile) * self.kv_heads * -(-end // KEYS)
        if rows > LARGE or (rows >= SEVERAL and reads > 2 * self.programs):
            tile = max(tile, LARGE_TILE)
        return tile


@dataclass(frozen=True, slots=True)
class Layout:
    """A described pass."""

    words: Words
    rows: int
    """Padded."""
    tile: int
    """Query rows of a tile."""
    shared: bool
    """Whether all keys are found through pages."""
    windows: tuple[int, ...]
    """Where the items of each window begin."""
    splits: bool
    """Whether some tile's blocks are shared out to several programs."""
    programs: int
    """Programs of attention."""
    deep: Pace
    """How much a program has to do one behind the other."""
    end: int
    """Where the items of the last window end and the lists begin."""
    pages: int
    """Where the pages begin."""

    @property
    def head_rows(self) -> int:
        """For how many rows of the head there is room."""
        return min(self.rows, HEAD_ROWS)

    @property
    def head_at(self) -> int:
        """Where the rows of the head are named; their draws follow."""
        return HEADER + ROW_FIELDS * self.rows


def listed(at: int) -> int:
    """A place among the lists, marked as one: it moves when the words are put together."""
    return -2 - at


def compose(
    tokens: IntArray,
    positions: IntArray,
    slots: IntArray,
    tiles: Sequence[IntArray],
    pages: Words,
    lists: Words,
    rows: int,
    tile: int,
    card: Card,
) -> Layout:
    """The words of a pass, from its rows and the tiles of each window."""
    count = len(tokens)
    splits = _spread(tiles, card, card.room // tile)
    places = []
    at = HEADER + ROW_FIELDS * rows + min(rows, HEAD_ROWS) * (1 + PLACES)
    lines = []
    for i, found in enumerate(tiles):
        line = _items(found, card, splits, last=i == len(tiles) - 1)
        lines.append(line)
        places.append(at)
        at += line.size
    pages_at = at + len(lists)
    words = np.zeros(pages_at + len(pages), dtype=np.int32)
    table = words[HEADER : HEADER + ROW_FIELDS * rows].reshape(ROW_FIELDS, rows)
    table[0, :count], table[1, :count], table[2, :count] = tokens, positions, slots
    table[2, count:] = card.spare
    words[pages_at:] = pages
    if len(lists):
        words[at:pages_at] = np.where(lists < -1, at + listed(0) - lists, lists)
    for place, line in zip(places, lines, strict=True):
        line[:, 2] += pages_at
        if len(lists):
            line[line[:, 3] >= 0, 3] += at
        words[place : place + line.size] = line.reshape(-1)
    most = max(int(np.count_nonzero(line[:, 1])) for line in lines) * card.kv_heads
    programs = card.programs * (2 if most > card.programs and any(map(shares, tiles)) else 1)
    deepest = max(int((line[:, 5] - line[:, 4]).max()) for line in lines)
    deep = Pace.DEEP if deepest >= DEEP else Pace.ONCE if most <= programs else Pace.SOME
    level = any(bool((found[:, _BLOCKS] == LEVEL).any()) for found in tiles)
    shared = not len(lists) and not level
    return Layout(words, rows, tile, shared, tuple(places), splits, programs, deep, at, pages_at)


def shares(found: IntArray) -> bool:
    """Whether some tile's nodes share a part of their keys."""
    return bool((found[:, _END] < found[:, _SIZE]).any())


def fits(tiles: Sequence[IntArray], room: int) -> bool:
    """Whether there is room for partial results of all blocks."""
    return all(int((found[:, _SIZE] - found[:, _FIRST]).sum()) <= room for found in tiles)


def _spread(tiles: Sequence[IntArray], card: Card, room: int) -> bool:
    """Whether one tile's blocks should be taken by several programs: if it would keep all waiting."""
    if not fits(tiles, room):
        return False
    spread = False
    for found in tiles:
        sizes = found[:, _SIZE] - found[:, _FIRST]
        share = max(1, int(sizes.sum()) * card.kv_heads // card.programs)
        spread |= int(sizes.max()) > 2 * share or shares(found)
    return spread


def _runs(found: IntArray, card: Card, splits: bool) -> tuple[IntArray, IntArray, IntArray]:
    """Runs of the blocks that a tile's nodes share: of which tile, from where, to where."""
    begins, ends = found[:, _FIRST], found[:, _END]
    if not splits:
        return np.arange(len(found)), begins, ends
    sizes = ends - begins
    listed_ones = ((found[:, _SIZE] - ends) * found[:, _NODES]).sum()
    share = max(1, -(-int(sizes.sum() + listed_ones) * card.kv_heads // card.programs))
    per = np.maximum(-(-sizes // np.maximum(-(-sizes // share), 1)), 1)
    pieces = -(-sizes // per)
    which = np.repeat(np.arange(len(found)), pieces)
    nth = np.arange(len(which)) - (np.cumsum(pieces) - pieces)[which]
    starts = begins[which] + nth * per[which]
    return which, starts, np.minimum(starts + per[which], ends[which])


def _items(found: IntArray, card: Card, splits: bool, last: bool) -> Words:
    """Runs of blocks: as many as fill the card, each tile's in order; behind them nothing."""
    which, starts, stops = _runs(found, card, splits)
    first, nodes, lists = np.zeros_like(which), found[which, _NODES], found[which, _BLOCKS]
    sharing = np.flatnonzero(found[:, _END] < found[:, _SIZE])
    if len(sharing):  # and of each node's own blocks
        owner = np.repeat(sharing, found[sharing, _NODES])
        nth = np.arange(len(owner)) - np.searchsorted(owner, owner)
        own, stop = found[owner, _END], found[owner, _SIZE]
        which, starts = np.concatenate([which, owner]), np.concatenate([starts, own])
        stops, first = np.concatenate([stops, stop]), np.concatenate([first, nth])
        nodes = np.concatenate([nodes, np.ones_like(owner)])
        near = found[owner, _NEAR] + nth * (stop - own)
        lists = np.concatenate([lists, near])
    pieces = np.bincount(which, minlength=len(found))
    sizes = found[:, _SIZE] - found[:, _FIRST]
    most = card.programs * (2 if len(sharing) else 1)
    room = len(which) + -(-most // card.kv_heads) + 1
    if not last:
        room = 1 << room.bit_length()  # few sizes: recorded passes hold where the next items begin
    words = np.zeros((room, FIELDS), dtype=np.int32)
    words[:, 3] = PAGED
    live = words[: len(which)]
    live[:, 0], live[:, 1] = found[which, _ROW] + first, nodes
    live[:, 2], live[:, 3] = found[which, _PAGES], lists
    live[:, 4], live[:, 5] = starts, stops
    live[:, 6], live[:, 7] = found[which, _FIRST], found[which, _SIZE]
    live[:, 8] = pieces[which]
    live[:, 9] = (np.cumsum(sizes) - sizes)[which]
    live[:, 10] = which
    live[:, 11], live[:, 12] = found[which, _LIMIT], found[which, _PLACE]
    live[:, 13], live[:, 14], live[:, 15] = first, found[which, _ROW], found[which, _NODES]
    if len(which) > card.programs:
        live[:] = live[np.argsort(starts - stops, kind="stable")]
    return words
