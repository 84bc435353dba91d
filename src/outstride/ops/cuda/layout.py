"""The description of a pass that goes to the card in one transfer.

Words of 32 bits: for each row its token, position and slot; then the items of each window, zeros
behind them; then pages and lists of slots. An item is a run of key blocks for a tile of queries.

Queries of an ordinary sequence (nothing missing, a chain of nodes) find their keys through the
pages, up to their limit. Any other query has a tile of its own, and the blocks in which something
else than plain context stands are listed slot by slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from outstride.core.graph import IntArray
from outstride.ops.contract import Span

KEYS = 128
"""Keys of a block."""
FIELDS = 16
"""Words of an item."""
ROW_FIELDS = 3
LARGE = 32
"""Query rows of one sequence above which tiles are large; more where heads are small, because then
reading keys several times costs less than waiting for a large tile."""

Words = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Layout:
    """A described pass."""

    words: Words
    rows: int
    """Padded."""
    count: int
    tile: int
    """Query rows of a tile."""
    shared: bool
    """Whether all keys are found through pages."""
    windows: tuple[int, ...]
    """Where the items of each window begin."""
    splits: bool
    """Whether some tile's blocks are shared out to several programs."""


class _Tile(NamedTuple):
    row: int
    nodes: int
    pages: int
    """Where its pages begin in the list of pages."""
    blocks: int
    """Where its list of blocks begins in `lists`, or -1."""
    size: int
    first: int
    limit: int
    """Keys below this position are seen by the first node, one more by each further one."""
    place: int
    """The position of the first node."""


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


def describe(
    spans: Sequence[Span],
    windows: Sequence[int | None],
    *,
    rows: int,
    group: int,
    kv_heads: int,
    wide: int,
    page_size: int,
    spare: int,
    programs: int,
    room: int,
) -> Layout:
    """Describes a pass over these spans, padded to `rows` rows.

    `spare` is the slot to which padding rows write; `programs` fill the card; `room` is how many
    words of partial results there are for each query row of each key head.
    """
    count = spans[-1].rows.stop
    plain = [ordinary(span, page_size) for span in spans]
    longest = max(
        len(s.graph.tokens) - s.first if p else 1 for s, p in zip(spans, plain, strict=True)
    )
    tile = 16
    while tile < group:
        tile *= 2
    if longest * group > (LARGE if group * wide > 256 else 8 * LARGE):
        tile = max(tile, 64)
    per = tile // group
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    pages: list[int] = []
    lists: list[int] = []
    made: list[list[_Tile]] = [[] for _ in windows]
    for span, simple in zip(spans, plain, strict=True):
        graph, first, row = span.graph, span.first, span.row
        nodes = len(graph.tokens) - first
        if nodes == 0:
            continue
        if nodes == 1:
            tokens.append(graph.tokens.item(first))
            positions.append(graph.positions.item(first))
            slots.append(span.slots.item(first))
        else:
            tokens += graph.tokens[first:].tolist()
            positions += graph.positions[first:].tolist()
            slots += span.slots[first:].tolist()
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
                    made[w].append(_Tile(row + start, some, at, -1, size, low, place + 1, place))
            continue
        lister = _Lister(span, page_size, lists)
        limit = lister.context if lister.plain else 0
        for w, window in enumerate(windows):
            for node in range(first, len(graph)):
                blocks = lister.node(node, window)
                where = len(lists)
                lists += blocks
                place = int(graph.positions[node])
                made[w].append(
                    _Tile(row + node - first, 1, at, where, len(blocks), 0, limit, place)
                )
    table = np.zeros((ROW_FIELDS, rows), dtype=np.int32)
    table[0, :count], table[1, :count], table[2, :count] = tokens, positions, slots
    np.maximum(table[0], 0, out=table[0])
    table[2, count:] = spare
    splits = _spread(made, kv_heads, programs, room // tile)
    lines = [_items(found, kv_heads, programs, splits) for found in made]
    lines[-1] = lines[-1][: np.flatnonzero(lines[-1][:, 1])[-1] + 2 + programs // kv_heads]
    places, at = [], ROW_FIELDS * rows
    for items in lines:
        places.append(at)
        at += items.size
    lists_at = at + len(pages)
    listed = np.asarray(lists, dtype=np.int32)
    for items, found in zip(lines, made, strict=True):
        items[:, 2] += at
        if lists:
            for t in found:
                if t.blocks >= 0:
                    part = listed[t.blocks : t.blocks + t.size]
                    part[part >= 0] += lists_at
            items[items[:, 3] >= 0, 3] += lists_at
    parts = [table.reshape(-1), *(items.reshape(-1) for items in lines)]
    return Layout(
        words=np.concatenate([*parts, np.asarray(pages, dtype=np.int32), listed]),
        rows=rows,
        count=count,
        tile=tile,
        shared=all(plain),
        windows=tuple(places),
        splits=splits,
    )


def _spread(made: Sequence[Sequence[_Tile]], kv_heads: int, programs: int, room: int) -> bool:
    """Whether one tile's blocks should be taken by several programs: if it would keep all waiting."""
    spread = False
    for found in made:
        sizes = [t.size - t.first for t in found]
        total = sum(sizes)
        if total > room:
            return False
        spread |= max(sizes, default=0) > 2 * max(1, total * kv_heads // programs)
    return spread


def _items(found: Sequence[_Tile], kv_heads: int, programs: int, splits: bool) -> Words:
    """Runs of blocks: as many as fill the card, each tile's in order; behind them nothing."""
    total = sum(t.size - t.first for t in found) * kv_heads
    share = max(1, -(-total // programs))
    rows: list[tuple[int, ...]] = []
    base = 0
    for ticket, t in enumerate(found):
        size = t.size - t.first
        pieces = -(-size // share) if splits else 1
        per = -(-size // pieces)
        pieces = -(-size // per)
        tile, tail = (t.row, t.nodes, t.pages, t.blocks), (t.limit, t.place, 0, 0, 0)
        for start in range(t.first, t.size, per):
            stop = min(start + per, t.size)
            rows.append((*tile, start, stop, t.first, t.size, pieces, base, ticket, *tail))
        base += size
    if len(rows) > programs:
        rows.sort(key=lambda item: item[4] - item[5])
    room = len(rows) + -(-programs // kv_heads) + 1
    words = np.zeros((1 << room.bit_length(), FIELDS), dtype=np.int32)  # few sizes: see `windows`
    words[:, 3] = -1
    words[: len(rows)] = rows
    return words
