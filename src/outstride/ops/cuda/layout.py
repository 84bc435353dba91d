"""The description of a pass that goes to the card in one transfer.

Words of 32 bits: a header (for each window how many items and where), then for each row its token,
position, slot and limit, then items, pages and lists of slots. An item is a run of key blocks for a
tile of queries. Queries of an ordinary sequence (nothing missing, a chain of nodes) find their keys
through the pages, up to their limit. Any other query has a tile of its own, and the blocks in which
something else than plain context stands are listed slot by slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outstride.core.graph import IntArray
from outstride.ops.contract import Span

KEYS = 64
"""Keys of a block."""
FIELDS = 12
"""Words of an item."""
HEAD = 16
"""Words of the header: room for eight windows."""
ROW_FIELDS = 4

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
    items: tuple[int, ...]
    """By window."""


@dataclass(slots=True)
class _Tile:
    row: int
    nodes: int
    pages: int
    """Where its pages begin in the list of pages."""
    blocks: int
    """Where its list of blocks begins in `lists`, or -1."""
    size: int
    first: int


def ordinary(span: Span, page_size: int) -> bool:
    """Whether entries and nodes stand at positions 0, 1, 2, … in the slots that the pages name."""
    table, graph, size = span.table, span.graph, len(span.table)
    if table.stale or len(graph) == 0:
        return False
    if not table.ordered or (size and table.positions[-1] != size - 1):
        return False
    if len(graph) == 1:
        if int(graph.positions[0]) != size:
            return False
        page = size // page_size
        return page < len(table.pages) and (
            int(span.slots[0]) == table.pages[page] * page_size + size % page_size
        )
    entries = np.arange(size, size + len(graph))
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
    longest = max(len(s.graph) - s.first if p else 1 for s, p in zip(spans, plain, strict=True))
    tile = 16
    while tile < group:
        tile *= 2
    if longest * group > 32:
        tile = max(tile, 64)
    if longest * group >= 512:
        tile = max(tile, 128)
    per = tile // group
    table = np.zeros((ROW_FIELDS, rows), dtype=np.int32)
    table[2, count:] = spare
    tokens, positions, slots, limits = table
    pages: list[int] = []
    lists: list[int] = []
    made: list[list[_Tile]] = [[] for _ in windows]
    for span, simple in zip(spans, plain, strict=True):
        graph, first, row = span.graph, span.first, span.row
        nodes = len(graph) - first
        if nodes == 0:
            continue
        stop = row + nodes
        tokens[row:stop] = graph.tokens[first:]
        positions[row:stop] = graph.positions[first:]
        slots[row:stop] = span.slots[first:]
        at = len(pages)
        pages += span.table.pages
        if simple:
            limits[row:stop] = positions[row:stop] + 1
            begin = len(span.table) + first
            for w, window in enumerate(windows):
                for start in range(0, nodes, per):
                    some = min(per, nodes - start)
                    size = (begin + start + some - 1) // KEYS + 1
                    low = 0 if window is None else max(begin + start - window + 1, 0) // KEYS
                    made[w].append(_Tile(row + start, some, at, -1, size, low))
            continue
        lister = _Lister(span, page_size, lists)
        limits[row:stop] = lister.context if lister.plain else 0
        for w, window in enumerate(windows):
            for node in range(first, len(graph)):
                blocks = lister.node(node, window)
                where = len(lists)
                lists += blocks
                made[w].append(_Tile(row + node - first, 1, at, where, len(blocks), 0))
    np.maximum(tokens, 0, out=tokens)
    head = HEAD + ROW_FIELDS * rows
    words: list[Words] = [np.zeros(HEAD, dtype=np.int32), table.reshape(-1)]
    pages_at = head
    lists_at = pages_at + len(pages)
    at = lists_at + len(lists)
    tail: list[Words] = []
    for w, found in enumerate(made):
        items = _items(found, kv_heads, programs, room // tile, pages_at, lists_at)
        words[0][2 * w], words[0][2 * w + 1] = len(items), at
        tail.append(items.reshape(-1))
        at += items.size
    moved = np.asarray(lists, dtype=np.int32)
    for found in made[:1]:
        if any(t.blocks >= 0 for t in found):
            moved = _moved(moved, made, lists_at)
            break
    words += [np.asarray(pages, dtype=np.int32), moved, *tail]
    return Layout(
        words=np.concatenate(words),
        rows=rows,
        count=count,
        tile=tile,
        shared=all(plain),
        items=tuple(len(found) for found in made),
    )


def _moved(lists: Words, made: Sequence[Sequence[_Tile]], by: int) -> Words:
    """The lists with places within them made places within all words."""
    moved = lists.copy()
    for found in made:
        for t in found:
            if t.blocks >= 0:
                part = moved[t.blocks : t.blocks + t.size]
                part[part >= 0] += by
    return moved


def _items(
    found: Sequence[_Tile], kv_heads: int, programs: int, room: int, pages_at: int, lists_at: int
) -> Words:
    """Runs of blocks: as many as fill the card, each tile's in order."""
    total = sum(t.size - t.first for t in found) * kv_heads
    share = max(1, -(-total // programs))
    rows: list[tuple[int, ...]] = []
    base = 0
    for ticket, t in enumerate(found):
        size = t.size - t.first
        pieces = -(-size // share)
        if pieces > 1 and base + size > room:
            pieces = 1
        per = -(-size // pieces)
        pieces = -(-size // per)
        blocks = -1 if t.blocks < 0 else lists_at + t.blocks
        for start in range(t.first, t.size, per):
            stop = min(start + per, t.size)
            rows.append(
                (t.row, t.nodes, pages_at + t.pages, blocks, start, stop, t.first, t.size)
                + (pieces, base, ticket, 0)
            )
        if pieces > 1:
            base += size
    rows.sort(key=lambda item: item[4] - item[5])
    return np.asarray(rows, dtype=np.int32).reshape(-1, FIELDS)
