"""The description of a pass that goes to the card in one transfer.

Words of 32 bits: a header; for each row its token, position and slot; for each row of the head where
it comes from and its draw; then the items of each window, zeros behind them; then pages and lists of
slots. An item is a run of key blocks for a tile of queries.

Queries of an ordinary sequence (nothing missing, a chain of nodes) find their keys through the
pages, up to their limit. Any other query has a tile of its own, and the blocks in which something
else than plain context stands are listed slot by slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outstride.core.graph import IntArray
from outstride.ops.contract import Span

KEYS = 128
"""Keys of a block."""
FIELDS = 16
"""Words of an item."""
HEADER = 16
"""Words before those of the rows; the first says where the tokens of the pass are to be put."""
ROW_FIELDS = 3
HEAD_ROWS = 128
"""So many rows of the vocabulary exist at once."""
PLACES = 12
"""Words that describe a row's draw."""
LARGE = 32
"""Query rows of one sequence above which tiles are large; more where heads are small, because then
reading keys several times costs less than waiting for a large tile."""

Words = npt.NDArray[np.int32]

_ROW, _NODES, _PAGES, _BLOCKS, _SIZE, _FIRST, _LIMIT, _PLACE = range(8)
"""Columns of a tile: its first row, how many nodes it has, where its pages and its list of blocks
(or -1) begin, the blocks in which its keys end and begin, below which position the first node sees
keys (one more for each further one), and the position of the first node."""


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

    def tile(self, longest: int) -> int:
        """Query rows of a tile, if the longest chain has so many nodes."""
        tile = 16
        while tile < self.group:
            tile *= 2
        if longest * self.group > (LARGE if self.group * self.wide > 256 else 8 * LARGE):
            tile = max(tile, 64)
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

    @property
    def head_rows(self) -> int:
        """For how many rows of the head there is room."""
        return min(self.rows, HEAD_ROWS)

    @property
    def head_at(self) -> int:
        """Where the rows of the head are named; their draws follow."""
        return HEADER + ROW_FIELDS * self.rows


def ordinary(span: Span, page_size: int) -> bool:
    """Whether entries and nodes stand at positions 0, 1, 2, … in the slots that the pages name."""
    table, graph, size = span.table, span.graph, len(span.table.positions)
    nodes = len(graph.tokens)
    if table.stale or nodes == 0:
        return False
    if not table.ordered or (size and table.positions[-1] != size - 1):
        return False
    if nodes == 1:
        if graph.positions.item(0) != size:
            return False
        page = size // page_size
        return page < len(table.pages) and (
            span.slots.item(0) == table.pages[page] * page_size + size % page_size
        )
    entries = np.arange(size, size + nodes)
    if not graph.is_chain or not np.array_equal(graph.positions, entries):
        return False
    if int(entries[-1]) // page_size >= len(table.pages):
        return False
    pages = np.asarray(table.pages, dtype=np.int64)
    named = pages[entries // page_size] * page_size + entries % page_size
    return bool(np.array_equal(named, span.slots))


class _Lister:
    """Lists of slots for queries whose keys do not simply follow the pages."""

    def __init__(self, span: Span, page_size: int, lists: list[int]) -> None:
        self.graph, self.node_slots, self.lists = span.graph, np.asarray(span.slots), lists
        table = span.table
        index = np.arange(len(table))
        positions = np.asarray(table.positions, dtype=np.int64)
        pages = np.asarray(table.pages, dtype=np.int64)
        slots = pages[index // page_size] * page_size + index % page_size
        if table.stale:
            fresh = index < len(table) - table.stale
            fresh |= ~np.isin(positions, span.graph.positions)
            positions, slots = positions[fresh], slots[fresh]
        top = max(int(positions.max(initial=0)), int(span.graph.positions.max(initial=0)))
        self.size = top // KEYS + 1
        self.base = np.full(self.size * KEYS, -1, dtype=np.int64)
        _, first = np.unique(positions, return_index=True)
        self.base[positions[first]] = slots[first]
        late = np.setdiff1d(np.arange(len(positions)), first)
        self.late = [(int(positions[i]), 0, int(i), int(slots[i])) for i in late]
        self.plain = len(positions) == 0 or (
            np.array_equal(positions, index) and len(positions) == len(index)
        )
        self.context = len(positions)
        self.shared: dict[int, int] = {}

    def _shared(self, block: int) -> int:
        """A block that holds context alone: found through pages, or listed once."""
        if self.plain:
            return -1
        if block not in self.shared:
            self.shared[block] = len(self.lists)
            self.lists += self.base[block * KEYS : (block + 1) * KEYS].tolist()
        return self.shared[block]

    def node(self, node: int, window: int | None) -> list[int]:
        """For each block of a node's keys, where its slots are listed; -1: found through pages."""
        graph, floor = self.graph, -1
        if window is not None:
            floor = int(graph.positions[node]) - window
        seen = np.flatnonzero(graph.sees[node])
        near: dict[int, IntArray] = {}
        spilled = [entry for entry in self.late if entry[0] > floor]
        for other in seen.tolist():
            position = int(graph.positions[other])
            if position <= floor:
                continue
            block, lane = position // KEYS, position % KEYS
            if block not in near:
                near[block] = self.base[block * KEYS : (block + 1) * KEYS].copy()
            if near[block][lane] < 0:
                near[block][lane] = self.node_slots[other]
            else:
                spilled.append((position, 1, other, int(self.node_slots[other])))
        blocks = []
        for block in range(self.size):
            if block in near:
                blocks.append(len(self.lists))
                self.lists += near[block].tolist()
            else:
                blocks.append(self._shared(block))
        spilled.sort()
        for start in range(0, len(spilled), KEYS):
            some = [entry[3] for entry in spilled[start : start + KEYS]]
            blocks.append(len(self.lists))
            self.lists += some + [-1] * (KEYS - len(some))
        return blocks


def describe(spans: Sequence[Span], windows: Sequence[int | None], rows: int, card: Card) -> Layout:
    """Describes a pass over these spans, padded to `rows` rows."""
    plain = [ordinary(span, card.page_size) for span in spans]
    longest = max(
        len(s.graph.tokens) - s.first if p else 1 for s, p in zip(spans, plain, strict=True)
    )
    tile = card.tile(longest)
    per = tile // card.group
    pages: list[int] = []
    lists: list[int] = []
    made: list[list[tuple[int, ...]]] = [[] for _ in windows]
    for span, simple in zip(spans, plain, strict=True):
        graph, first, row = span.graph, span.first, span.row
        nodes = len(graph.tokens) - first
        if nodes == 0:
            continue
        at = len(pages)
        pages += span.table.pages
        if simple:
            begin = len(span.table.positions) + first
            for w, window in enumerate(windows):
                for start in range(0, nodes, per):
                    some = min(per, nodes - start)
                    place = begin + start
                    size = (place + some - 1) // KEYS + 1
                    low = 0 if window is None else max(place - window + 1, 0) // KEYS
                    made[w].append((row + start, some, at, -1, size, low, place + 1, place))
            continue
        lister = _Lister(span, card.page_size, lists)
        limit = lister.context if lister.plain else 0
        for w, window in enumerate(windows):
            for node in range(first, len(graph)):
                blocks = lister.node(node, window)
                where = len(lists)
                lists += blocks
                place = int(graph.positions[node])
                made[w].append((row + node - first, 1, at, where, len(blocks), 0, limit, place))
    live = [span for span in spans if span.first < len(span.graph.tokens)]
    return compose(
        np.maximum(np.concatenate([span.graph.tokens[span.first :] for span in live]), 0),
        np.concatenate([span.graph.positions[span.first :] for span in live]),
        np.concatenate([span.slots[span.first :] for span in live]),
        [np.asarray(found, dtype=np.int64).reshape(-1, 8) for found in made],
        np.asarray(pages, dtype=np.int32),
        np.asarray(lists, dtype=np.int32),
        rows,
        tile,
        card,
    )


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
    words = np.zeros(at + len(pages) + len(lists), dtype=np.int32)
    table = words[HEADER : HEADER + ROW_FIELDS * rows].reshape(ROW_FIELDS, rows)
    table[0, :count], table[1, :count], table[2, :count] = tokens, positions, slots
    table[2, count:] = card.spare
    words[at : at + len(pages)] = pages
    lists_at = at + len(pages)
    if len(lists):
        words[lists_at:] = lists
        for found in tiles:
            for t in found[found[:, _BLOCKS] >= 0]:
                begin = lists_at + t[_BLOCKS]
                part = words[begin : begin + t[_SIZE]]
                part[part >= 0] += lists_at
    for place, line in zip(places, lines, strict=True):
        line[:, 2] += at
        if len(lists):
            line[line[:, 3] >= 0, 3] += lists_at
        words[place : place + line.size] = line.reshape(-1)
    return Layout(words, rows, tile, not len(lists), tuple(places), splits)


def _spread(tiles: Sequence[IntArray], card: Card, room: int) -> bool:
    """Whether one tile's blocks should be taken by several programs: if it would keep all waiting."""
    spread = False
    for found in tiles:
        sizes = found[:, _SIZE] - found[:, _FIRST]
        total = int(sizes.sum())
        if total > room:
            return False
        spread |= int(sizes.max()) > 2 * max(1, total * card.kv_heads // card.programs)
    return spread


def _items(found: IntArray, card: Card, splits: bool, last: bool) -> Words:
    """Runs of blocks: as many as fill the card, each tile's in order; behind them nothing."""
    begins, ends = found[:, _FIRST], found[:, _SIZE]
    sizes = ends - begins
    if splits:
        share = max(1, -(-int(sizes.sum()) * card.kv_heads // card.programs))
        per = -(-sizes // -(-sizes // share))
        pieces = -(-sizes // per)
        which = np.repeat(np.arange(len(found)), pieces)
        nth = np.arange(len(which)) - (np.cumsum(pieces) - pieces)[which]
        starts = begins[which] + nth * per[which]
        stops = np.minimum(starts + per[which], ends[which])
    else:
        which = np.arange(len(found))
        starts, stops, pieces = begins, ends, np.ones_like(sizes)
    if len(which) > card.programs:
        order = np.argsort(starts - stops, kind="stable")
        which, starts, stops = which[order], starts[order], stops[order]
    room = len(which) + -(-card.programs // card.kv_heads) + 1
    if not last:
        room = 1 << room.bit_length()  # few sizes: recorded passes hold where the next items begin
    words = np.zeros((room, FIELDS), dtype=np.int32)
    words[:, 3] = -1
    live = words[: len(which)]
    live[:, :4] = found[which, :4]
    live[:, 4], live[:, 5] = starts, stops
    live[:, 6], live[:, 7] = begins[which], ends[which]
    live[:, 8] = pieces[which]
    live[:, 9] = (np.cumsum(sizes) - sizes)[which]
    live[:, 10] = which
    live[:, 11], live[:, 12] = found[which, _LIMIT], found[which, _PLACE]
    return words
