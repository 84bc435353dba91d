"""From the spans of a pass to its metadata: which keys are found through pages, which are listed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from outstride.core.graph import IntArray, TokenGraph
from outstride.ops.contract import Span
from outstride.ops.cuda.batch_metadata import (
    AttentionGeometry,
    BatchMetadata,
    assemble,
    fits,
    in_lists,
    shares_keys,
)
from outstride.ops.cuda.metadata import (
    BLOCK_KEYS,
    ITEM_PLACES,
    PAGED,
    SAME_LIMIT,
    TILE_SIZE,
    Int32Array,
    RowField,
    row_table,
)

MAX_OWN_BLOCKS = 8
"""Over more blocks than this, nodes are not listed block by block for each of them."""
MAX_TEMPLATES = 1024
"""How many templates are kept."""
_NO_WORDS = np.zeros(0, dtype=np.int32)


def ordinary(span: Span, page_size: int) -> bool:
    """Whether KV and nodes are at positions 0, 1, 2, ... in the slots that the pages name."""
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
    places = np.arange(size, size + nodes)
    if not graph.is_chain or not np.array_equal(graph.positions, places):
        return False
    if int(places[-1]) // page_size >= len(table.pages):
        return False
    pages = np.asarray(table.pages, dtype=np.int64)
    named = pages[places // page_size] * page_size + places % page_size
    return bool(np.array_equal(named, span.slots))


def _own_slots(span: Span, page_size: int) -> tuple[int, Int32Array] | None:
    """Slots of each node's keys by position [nodes, keys], from the block in which the context ends.

    None if some node stands within the context, or two at one position that see each other.
    """
    table, graph, context = span.table, span.graph, len(span.table.positions)
    if table.stale or not table.ordered or (context and table.positions[-1] != context - 1):
        return None
    places, above, first = graph.positions, graph.parents, context // BLOCK_KEYS
    size = int(places.max()) // BLOCK_KEYS + 1 - first
    if size > MAX_OWN_BLOCKS or int(places.min()) < context:
        return None
    count, lanes = len(graph.tokens), places - first * BLOCK_KEYS
    near = np.full((count + 1, size * BLOCK_KEYS), -1, dtype=np.int32)
    index = np.arange(first * BLOCK_KEYS, context)
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


class _SlotLists:
    """Lists of slots for queries whose keys do not simply follow the pages."""

    def __init__(self, span: Span, page_size: int, lists: list[int], begin: int) -> None:
        self.graph, self.node_slots, self.lists = span.graph, np.asarray(span.slots), lists
        self.begin = begin
        """How many words the lists before `lists` take."""
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
        self.size = top // BLOCK_KEYS + 1
        self.base = np.full(self.size * BLOCK_KEYS, -1, dtype=np.int64)
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
            self.shared[block] = in_lists(self.begin + len(self.lists))
            self.lists += self.base[block * BLOCK_KEYS : (block + 1) * BLOCK_KEYS].tolist()
        return self.shared[block]

    def node(self, node: int, window: int | None) -> list[int]:
        """For each block of a node's keys, where its slots are listed, or PAGED."""
        graph, floor = self.graph, -1
        if window is not None:
            floor = int(graph.positions[node]) - window
        seen = np.flatnonzero(graph.sees[node])
        near: dict[int, IntArray] = {}
        spilled = [late for late in self.late if late[0] > floor]
        for other in seen.tolist():
            position = int(graph.positions[other])
            if position <= floor:
                continue
            block, lane = position // BLOCK_KEYS, position % BLOCK_KEYS
            if block not in near:
                near[block] = self.base[block * BLOCK_KEYS : (block + 1) * BLOCK_KEYS].copy()
            if near[block][lane] < 0:
                near[block][lane] = self.node_slots[other]
            else:
                spilled.append((position, 1, other, int(self.node_slots[other])))
        blocks = []
        for block in range(self.size):
            if block in near:
                blocks.append(in_lists(self.begin + len(self.lists)))
                self.lists += near[block].tolist()
            else:
                blocks.append(self._shared(block))
        spilled.sort()
        for start in range(0, len(spilled), BLOCK_KEYS):
            some = [late[3] for late in spilled[start : start + BLOCK_KEYS]]
            blocks.append(in_lists(self.begin + len(self.lists)))
            self.lists += some + [-1] * (BLOCK_KEYS - len(some))
        return blocks


class _TileList:
    """The tiles of a pass, window by window, and the pages and lists that they refer to."""

    def __init__(
        self, windows: Sequence[int | None], geometry: AttentionGeometry, tile: int
    ) -> None:
        self.windows, self.geometry, self.per = windows, geometry, tile // geometry.group
        self.pages: list[int] = []
        self.lists: list[Int32Array] = []
        self.made: list[list[tuple[int, ...]]] = [[] for _ in windows]
        self._listed = 0

    def chain(self, span: Span) -> None:
        """A chain in the slots that the pages name."""
        nodes = len(span.graph.tokens) - span.first
        begin, at, per = len(span.table.positions) + span.first, self._pages(span), self.per
        for made, window in zip(self.made, self.windows, strict=True):
            for start in range(0, nodes, per):
                some, place = min(per, nodes - start), begin + start
                size = (place + some - 1) // BLOCK_KEYS + 1
                low = 0 if window is None else max(place - window + 1, 0) // BLOCK_KEYS
                row = span.row + start
                made.append((row, some, at, PAGED, size, low, place + 1, place, size, 0))

    def after_context(self, span: Span, first: int, own: Int32Array) -> None:
        """Nodes of any kind after plain context; `own` has their slots from block `first` on."""
        nodes, size = len(span.graph.tokens), own.shape[1] // BLOCK_KEYS
        at, context = self._pages(span), len(span.table.positions)
        index = self._list(own[span.first :].reshape(-1))
        blocks = (
            in_lists(index) - np.arange((nodes - span.first) * size, dtype=np.int32) * BLOCK_KEYS
        )
        if self._listed < first:  # a list is found by the block that it belongs to
            self._list(np.zeros(first - self._listed, dtype=np.int32))
        where = self._list(blocks.astype(np.int32)) - first
        end = first + size
        for made, window in zip(self.made, self.windows, strict=True):
            per = self.per if window is None else 1
            for start in range(span.first, nodes, per):
                place = span.graph.positions.item(start)
                low = 0 if window is None else min(max(place - window + 1, 0) // BLOCK_KEYS, first)
                row, some = span.row + start - span.first, min(per, nodes - start)
                lists = where + (start - span.first) * size
                made.append((row, some, at, SAME_LIMIT, end, low, context, place, first, lists))

    def single(self, span: Span) -> None:
        """Nodes that each have a list of blocks of their own."""
        lists: list[int] = []
        at, lister = (
            self._pages(span),
            _SlotLists(span, self.geometry.page_size, lists, self._listed),
        )
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

    def _list(self, words: Int32Array) -> int:
        at = self._listed
        self.lists.append(words)
        self._listed += len(words)
        return at

    def arrays(self) -> list[IntArray]:
        return [np.asarray(found, dtype=np.int64).reshape(-1, TILE_SIZE) for found in self.made]


@dataclass(frozen=True, slots=True)
class _SequenceTemplate:
    """The metadata of a pass over one sequence, but for its rows, pages, lists and positions."""

    made: BatchMetadata
    context: int


class MetadataBuilder:
    """Makes the metadata of passes. Those of one sequence differ in little: templates are kept."""

    def __init__(self, geometry: AttentionGeometry) -> None:
        self.geometry = geometry
        self._templates: dict[tuple[object, ...], _SequenceTemplate] = {}

    def __call__(
        self, spans: Sequence[Span], windows: Sequence[int | None], rows: int
    ) -> BatchMetadata:
        """The metadata of a pass over these spans, padded to `rows` rows."""
        live = [span for span in spans if span.first < len(span.graph.tokens)]
        if len(live) == 1 and live[0].first == 0 and len(windows) == 1:
            return self._single(live[0], windows[0], rows)
        return self._several(live, windows, rows)

    def _single(self, span: Span, window: int | None, rows: int) -> BatchMetadata:
        """A pass over one sequence, from a template if there is one that fits."""
        count, context = len(span.graph.tokens), len(span.table.positions)
        lows: list[int] = []
        if window is not None:  # in which block each node begins to see keys
            lows = (np.maximum(span.graph.positions - window + 1, 0) // BLOCK_KEYS).tolist()
        own: tuple[int, Int32Array] | None = None
        plain = ordinary(span, self.geometry.page_size)
        if plain:
            per = self.geometry.tile(count, context + count) // self.geometry.group
            ends = range(context + per - 1, context + count - 1, per)
            blocks = [end // BLOCK_KEYS for end in (*ends, context + count - 1)]
            key: tuple[object, ...] = (rows, count, window, *blocks, *lows)
        elif (own := _own_slots(span, self.geometry.page_size)) is not None:
            key = (rows, count, "own", own[0], own[1].shape[1], window, *lows)
        else:
            return self._several([span], (window,), rows)
        template = self._templates.get(key)
        if template is not None:
            return _filled(template, span, None if own is None else own[1])
        made = self._several([span], (window,), rows, own)
        if made.splits or made.paged:  # else there was no space to share keys
            if len(self._templates) >= MAX_TEMPLATES:
                self._templates.clear()
            kept = replace(made, words=made.words.copy())
            self._templates[key] = _SequenceTemplate(kept, context)
        return made

    def _several(
        self,
        live: Sequence[Span],
        windows: Sequence[int | None],
        rows: int,
        known: tuple[int, Int32Array] | None = None,
    ) -> BatchMetadata:
        """Works it out; `known` is `_own_slots` of the first span, if that is known already."""
        geometry = self.geometry
        plain = [ordinary(span, geometry.page_size) for span in live]
        longest, end = 1, 0
        for span, simple in zip(live, plain, strict=True):
            if simple:
                longest = max(longest, len(span.graph.tokens) - span.first)
                end = max(end, len(span.table.positions) + len(span.graph.tokens))
        tile = geometry.tile(longest, end)
        for shared in (True, False):
            tiles = _TileList(windows, geometry, tile)
            for span, simple in zip(live, plain, strict=True):
                if simple:
                    tiles.chain(span)
                elif shared and (own := known or _own_slots(span, geometry.page_size)) is not None:
                    tiles.after_context(span, *own)
                else:
                    tiles.single(span)
            found = tiles.arrays()
            if fits(found, geometry.max_partials // tile) or not any(map(shares_keys, found)):
                break
        return assemble(
            np.concatenate([_embedded(span.graph)[span.first :] for span in live]),
            np.concatenate([span.graph.positions[span.first :] for span in live]),
            np.concatenate([span.slots[span.first :] for span in live]),
            found,
            np.asarray(tiles.pages, dtype=np.int32),
            np.concatenate([_NO_WORDS, *tiles.lists]),
            rows,
            tile,
            geometry,
        )


def _embedded(graph: TokenGraph) -> IntArray:
    """The tokens whose embedding is read; a mixture reads some token, and is entered afterwards."""
    tokens: IntArray = np.maximum(graph.tokens, 0)
    return tokens


def _filled(template: _SequenceTemplate, span: Span, own: Int32Array | None) -> BatchMetadata:
    """A template with the rows, pages, lists and positions of this pass."""
    made, graph, context = template.made, span.graph, len(span.table.positions)
    pages, count = span.table.pages, len(graph.tokens)
    words = np.empty(made.pages_at + len(pages), dtype=np.int32)
    words[: made.pages_at] = made.words[: made.pages_at]
    words[made.pages_at :] = pages
    table = row_table(words, made.rows)
    table[RowField.TOKEN, :count] = _embedded(graph)
    table[RowField.POSITION, :count], table[RowField.SLOT, :count] = graph.positions, span.slots
    filled = replace(made, words=words)
    filled.live_items()[:, ITEM_PLACES] += context - template.context
    if own is not None:
        words[made.lists_at : made.lists_at + own.size] = own.reshape(-1)
    return filled
