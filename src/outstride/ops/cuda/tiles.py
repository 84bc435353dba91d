"""From the spans of a pass to its tiles: whose keys are found through pages, and whose are listed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from outstride.core.graph import IntArray
from outstride.ops.contract import Span
from outstride.ops.cuda.layout import (
    COLUMNS,
    FIELDS,
    HEADER,
    KEYS,
    LEVEL,
    PAGED,
    ROW_FIELDS,
    Card,
    Layout,
    Words,
    compose,
    fits,
    listed,
    shares,
)

FAR = 8
"""Over more blocks than this, nodes are not listed block by block for each of them."""
MOULDS = 1024
"""So many are kept."""
_NO_WORDS = np.zeros(0, dtype=np.int32)


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


def _near(span: Span, page_size: int) -> tuple[int, Words] | None:
    """Slots of each node's keys by position, from the block on in which the context ends.

    None if some node stands within the context, or two at one position that see each other.
    """
    table, graph, context = span.table, span.graph, len(span.table.positions)
    if table.stale or not table.ordered or (context and table.positions[-1] != context - 1):
        return None
    places, above, first = graph.positions, graph.parents, context // KEYS
    size = int(places.max()) // KEYS + 1 - first
    if size > FAR or int(places.min()) < context:
        return None
    count, lanes = len(graph.tokens), places - first * KEYS
    near = np.full((count + 1, size * KEYS), -1, dtype=np.int32)
    index = np.arange(first * KEYS, context)
    pages = np.asarray(table.pages, dtype=np.int64)
    near[:, : len(index)] = pages[index // page_size] * page_size + index % page_size
    if graph.is_tree:
        if not ((above < 0) | (places > places[above])).all():
            return None
        own = zip(above.tolist(), lanes.tolist(), span.slots.tolist(), strict=True)
        for node, (parent, lane, slot) in enumerate(own):  # the last row is that of no parent
            near[node] = near[parent]
            near[node, lane] = slot
    else:
        seer, seen = np.nonzero(graph.sees)
        near[seer, lanes[seen]] = np.asarray(span.slots)[seen]
        if (near[:count] >= 0).sum() - count * len(index) != len(seen):
            return None
    return first, near[:count]


class _Lister:
    """Lists of slots for queries whose keys do not simply follow the pages."""

    def __init__(self, span: Span, page_size: int, lists: list[int], begin: int) -> None:
        self.graph, self.node_slots, self.lists = span.graph, np.asarray(span.slots), lists
        self.begin = begin
        """How many words are listed before `lists`."""
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
            return PAGED
        if block not in self.shared:
            self.shared[block] = listed(self.begin + len(self.lists))
            self.lists += self.base[block * KEYS : (block + 1) * KEYS].tolist()
        return self.shared[block]

    def node(self, node: int, window: int | None) -> list[int]:
        """For each block of a node's keys, where its slots are listed, or PAGED."""
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
                blocks.append(listed(self.begin + len(self.lists)))
                self.lists += near[block].tolist()
            else:
                blocks.append(self._shared(block))
        spilled.sort()
        for start in range(0, len(spilled), KEYS):
            some = [entry[3] for entry in spilled[start : start + KEYS]]
            blocks.append(listed(self.begin + len(self.lists)))
            self.lists += some + [-1] * (KEYS - len(some))
        return blocks


class _Tiles:
    """The tiles of a pass, window by window, and what they refer to."""

    def __init__(self, windows: Sequence[int | None], card: Card, tile: int) -> None:
        self.windows, self.card, self.per = windows, card, tile // card.group
        self.pages: list[int] = []
        self.lists: list[Words] = []
        self.made: list[list[tuple[int, ...]]] = [[] for _ in windows]
        self._listed = 0

    def chain(self, span: Span) -> None:
        """A chain in the slots that the pages name."""
        nodes = len(span.graph.tokens) - span.first
        begin, at, per = len(span.table.positions) + span.first, self._pages(span), self.per
        for made, window in zip(self.made, self.windows, strict=True):
            for start in range(0, nodes, per):
                some, place = min(per, nodes - start), begin + start
                size = (place + some - 1) // KEYS + 1
                low = 0 if window is None else max(place - window + 1, 0) // KEYS
                row = span.row + start
                made.append((row, some, at, PAGED, size, low, place + 1, place, size, 0))

    def behind(self, span: Span, first: int, near: Words) -> None:
        """Nodes of any kind behind plain context; `near` has their slots from block `first` on."""
        nodes, size = len(span.graph.tokens), near.shape[1] // KEYS
        at, context = self._pages(span), len(span.table.positions)
        index = self._list(near[span.first :].reshape(-1))
        blocks = listed(index) - np.arange((nodes - span.first) * size, dtype=np.int32) * KEYS
        if self._listed < first:  # a list is found by the block that it belongs to
            self._list(np.zeros(first - self._listed, dtype=np.int32))
        where = self._list(blocks.astype(np.int32)) - first
        end = first + size
        for made, window in zip(self.made, self.windows, strict=True):
            per = self.per if window is None else 1
            for start in range(span.first, nodes, per):
                place = span.graph.positions.item(start)
                low = 0 if window is None else min(max(place - window + 1, 0) // KEYS, first)
                row, some = span.row + start - span.first, min(per, nodes - start)
                lists = where + (start - span.first) * size
                made.append((row, some, at, LEVEL, end, low, context, place, first, lists))

    def single(self, span: Span) -> None:
        """Nodes that each have a list of blocks of their own."""
        lists: list[int] = []
        at, lister = self._pages(span), _Lister(span, self.card.page_size, lists, self._listed)
        limit = lister.context if lister.plain else 0
        for made, window in zip(self.made, self.windows, strict=True):
            for node in range(span.first, len(span.graph)):
                blocks = lister.node(node, window)
                where, size = self._listed + len(lists), len(blocks)
                lists += blocks
                row, place = span.row + node - span.first, int(span.graph.positions[node])
                made.append((row, 1, at, where, size, 0, limit, place, size, 0))
        self._list(np.asarray(lists, dtype=np.int32))

    def _pages(self, span: Span) -> int:
        at = len(self.pages)
        self.pages += span.table.pages
        return at

    def _list(self, words: Words) -> int:
        at = self._listed
        self.lists.append(words)
        self._listed += len(words)
        return at

    def arrays(self) -> list[IntArray]:
        return [np.asarray(found, dtype=np.int64).reshape(-1, COLUMNS) for found in self.made]


@dataclass(frozen=True, slots=True)
class _Mould:
    """The words of a pass over one sequence, but for its rows, pages, lists and where it stands."""

    layout: Layout
    context: int
    live: int
    """How many items there are."""


class Describer:
    """Describes passes. Those of one sequence differ in little, and what is the same is kept."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self._moulds: dict[tuple[object, ...], _Mould] = {}

    def __call__(self, spans: Sequence[Span], windows: Sequence[int | None], rows: int) -> Layout:
        """Describes a pass over these spans, padded to `rows` rows."""
        live = [span for span in spans if span.first < len(span.graph.tokens)]
        if len(live) == 1 and live[0].first == 0 and len(windows) == 1:
            return self._single(live[0], windows[0], rows)
        return self._several(live, windows, rows)

    def _single(self, span: Span, window: int | None, rows: int) -> Layout:
        """A pass over one sequence from a mould, if there is one that fits."""
        count, context = len(span.graph.tokens), len(span.table.positions)
        lows: list[int] = []
        if window is not None:  # in which block each node begins to see keys
            lows = (np.maximum(span.graph.positions - window + 1, 0) // KEYS).tolist()
        near: tuple[int, Words] | None = None
        plain = ordinary(span, self.card.page_size)
        if plain:
            per = self.card.tile(count, context + count) // self.card.group
            ends = range(context + per - 1, context + count - 1, per)
            blocks = [end // KEYS for end in (*ends, context + count - 1)]
            key: tuple[object, ...] = (rows, count, window, *blocks, *lows)
        elif (near := _near(span, self.card.page_size)) is not None:
            key = (rows, count, "near", near[0], near[1].shape[1], window, *lows)
        else:
            return self._several([span], (window,), rows)
        mould = self._moulds.get(key)
        if mould is not None:
            return _filled(mould, span, None if near is None else near[1])
        layout = self._several([span], (window,), rows, near)
        if layout.splits or layout.shared:  # else there was no room to share keys
            if len(self._moulds) >= MOULDS:
                self._moulds.clear()
            items = layout.words[layout.windows[0] : layout.end].reshape(-1, FIELDS)
            live = int(np.count_nonzero(items[:, 1]))
            kept = replace(layout, words=layout.words.copy())
            self._moulds[key] = _Mould(kept, context, live)
        return layout

    def _several(
        self,
        live: Sequence[Span],
        windows: Sequence[int | None],
        rows: int,
        known: tuple[int, Words] | None = None,
    ) -> Layout:
        """Works it out; `known` is what `_near` says of the first span, if that has been asked."""
        card = self.card
        plain = [ordinary(span, card.page_size) for span in live]
        longest, end = 1, 0
        for span, simple in zip(live, plain, strict=True):
            if simple:
                longest = max(longest, len(span.graph.tokens) - span.first)
                end = max(end, len(span.table.positions) + len(span.graph.tokens))
        tile = card.tile(longest, end)
        for shared in (True, False):
            tiles = _Tiles(windows, card, tile)
            for span, simple in zip(live, plain, strict=True):
                if simple:
                    tiles.chain(span)
                elif shared and (near := known or _near(span, card.page_size)) is not None:
                    tiles.behind(span, *near)
                else:
                    tiles.single(span)
            found = tiles.arrays()
            if fits(found, card.room // tile) or not any(map(shares, found)):
                break
        return compose(
            np.maximum(np.concatenate([span.graph.tokens[span.first :] for span in live]), 0),
            np.concatenate([span.graph.positions[span.first :] for span in live]),
            np.concatenate([span.slots[span.first :] for span in live]),
            found,
            np.asarray(tiles.pages, dtype=np.int32),
            np.concatenate([_NO_WORDS, *tiles.lists]),
            rows,
            tile,
            card,
        )


def _filled(mould: _Mould, span: Span, near: Words | None) -> Layout:
    """A mould with what is new in this pass."""
    made, graph, context = mould.layout, span.graph, len(span.table.positions)
    pages, count = span.table.pages, len(graph.tokens)
    words = np.empty(made.pages + len(pages), dtype=np.int32)
    words[: made.pages] = made.words[: made.pages]
    words[made.pages :] = pages
    table = words[HEADER : HEADER + ROW_FIELDS * made.rows].reshape(ROW_FIELDS, made.rows)
    table[0, :count], table[1, :count], table[2, :count] = graph.tokens, graph.positions, span.slots
    begin = made.windows[0]
    items = words[begin : begin + mould.live * FIELDS].reshape(-1, FIELDS)
    items[:, 11:13] += context - mould.context
    if near is not None:
        words[made.end : made.end + near.size] = near.reshape(-1)
    return replace(made, words=words)
