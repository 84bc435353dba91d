"""The attention plan of a pass: which query attends to which KV, worked out once for all layers.

Attention is split into pairs of a tile of query rows and a block of keys. All pairs have the same
shape, so a row's arithmetic is the same whatever else is in the batch. Within a block a key has the
lane of its *logical position* (position p is lane p % 64 of block p // 64), whichever slot holds it:
the order of every sum follows from positions alone, never from where KV happens to be stored.

Where no two visible keys have the same position (prompts, chains, masked blocks) the queries of a
sequence share their tiles. Where they do (trees, siblings) the blocks around the graph are laid out
once per path, and only the blocks that hold nothing but context are shared. If a single query sees
two keys at one position, the later ones go to additional blocks after the ordinary ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from outstride.core.graph import BoolArray, IntArray
from outstride.ops.contract import Span
from outstride.ops.weights import SKIP_FIRST

ROWS = 32
"""Query rows of a tile: a row is one query head of one node."""
KEYS = 64
"""Keys of a block."""
PAIRS = 96
"""About how many pairs (times key heads) are in flight at once: bounds memory, not results."""

# Owners of lanes: a node of the graph (its id), the context, or none.
_CONTEXT = -1
_UNUSED = -2


@dataclass(frozen=True, slots=True)
class Level:
    """One round of pairwise sums: partial result `right[i]` is added to `left[onto[i]]`."""

    left: torch.Tensor
    right: torch.Tensor
    onto: torch.Tensor | None
    """None if every left one has a right neighbour, in order."""


@dataclass(frozen=True, slots=True)
class AttentionChunk:
    """Pairs that are computed together, and how their partial results are combined to rows."""

    queries: torch.Tensor
    """[pairs * ROWS]: the query row of each row of each pair."""
    keys: torch.Tensor
    """[pairs * KEYS]: the slot of each lane of each pair."""
    bias: torch.Tensor
    """[masked pairs, ROWS, KEYS]: 0 or -inf for the first pairs; the others see all keys."""
    partials: torch.Tensor
    """The partial results that count, by row and then by block."""
    owners: torch.Tensor
    """The index in `rows` that each of them belongs to."""
    row_partials: torch.Tensor
    """[rows * longest]: the partial results of each row, padded with repetitions, for the maximum."""
    levels: tuple[Level, ...]
    rows: torch.Tensor
    """The query rows that this chunk computes."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """All chunks of a pass."""

    chunks: tuple[AttentionChunk, ...]


@dataclass(slots=True)
class _Builder:
    """Collects tiles, and splits them into chunks between units that must stay together."""

    limit: int
    chunks: list[AttentionChunk] = field(default_factory=list)
    count: int = 0
    queries: list[IntArray] = field(default_factory=list)
    keys: list[IntArray] = field(default_factory=list)
    partial: list[BoolArray] = field(default_factory=list)
    whole: list[BoolArray] = field(default_factory=list)
    pair: list[IntArray] = field(default_factory=list)
    line: list[IntArray] = field(default_factory=list)
    block: list[IntArray] = field(default_factory=list)

    def tile(self, rows: IntArray, lanes: IntArray, seen: BoolArray, blocks: IntArray) -> None:
        """At most ROWS query rows against blocks of keys; `seen` is [rows, blocks, KEYS]."""
        some: BoolArray = np.any(seen, axis=2)
        used = np.flatnonzero(some.any(axis=0))
        if len(used) < len(blocks):
            seen, some, lanes, blocks = seen[:, used], some[:, used], lanes[used], blocks[used]
        padded = np.full(ROWS, rows[0])
        padded[: len(rows)] = rows
        mask = np.ones((len(blocks), ROWS, KEYS), dtype=np.bool_)
        mask[:, : len(rows)] = seen.transpose(1, 0, 2)
        line, which = np.nonzero(some)
        self.queries.append(np.broadcast_to(padded, (len(blocks), ROWS)))
        self.keys.append(lanes)
        whole: BoolArray = np.all(mask, axis=(1, 2))
        self.whole.append(whole)
        self.partial.append(mask[~whole])
        self.pair.append((self.count + which) * ROWS + line)
        self.line.append(rows[line])
        self.block.append(blocks[which])
        self.count += len(blocks)

    def close_unit(self) -> None:
        if self.count >= self.limit:
            self.flush()

    def flush(self) -> None:
        if self.count == 0:
            return
        whole = np.concatenate(self.whole)
        order = np.argsort(whole, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        pair = np.concatenate(self.pair)
        pair = place[pair // ROWS] * ROWS + pair % ROWS
        line, block = np.concatenate(self.line), np.concatenate(self.block)
        by_row = np.lexsort((block, line))
        pair, line, block = pair[by_row], line[by_row], block[by_row]
        rows, starts, owners, counts = np.unique(
            line, return_index=True, return_inverse=True, return_counts=True
        )
        reach = np.minimum(np.arange(int(counts.max())), counts[:, None] - 1)
        bias = np.where(np.concatenate(self.partial), np.float32(0), np.float32(-np.inf))
        self.chunks.append(
            AttentionChunk(
                queries=_tensor(np.concatenate(self.queries)[order].reshape(-1)),
                keys=_tensor(np.concatenate(self.keys)[order].reshape(-1)),
                bias=torch.from_numpy(bias),
                partials=_tensor(pair),
                owners=_tensor(owners.reshape(-1)),
                row_partials=_tensor((starts[:, None] + reach).reshape(-1)),
                levels=_levels(line, block),
                rows=_tensor(rows),
            )
        )
        self.count = 0
        for part in (self.queries, self.keys, self.partial, self.whole):
            part.clear()
        for part in (self.pair, self.line, self.block):
            part.clear()


def _tensor(values: IntArray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))


def _levels(line: IntArray, block: IntArray) -> tuple[Level, ...]:
    """Adds the partial results of each row as a binary tree over absolute block numbers.

    A missing neighbour counts as zero, so blocks that no query sees may be left out, and a row gets the
    same sum whether or not other rows of its tile see more blocks.
    """
    levels = []
    while len(line) and (line[1:] == line[:-1]).any():
        block = block >> 1
        fresh = np.ones(len(line), dtype=np.bool_)
        fresh[1:] = (line[1:] != line[:-1]) | (block[1:] != block[:-1])
        left, right = np.flatnonzero(fresh), np.flatnonzero(~fresh)
        if len(right):
            onto = np.cumsum(fresh)[right] - 1
            everyone = len(left) == len(right)
            levels.append(Level(_tensor(left), _tensor(right), None if everyone else _tensor(onto)))
        line, block = line[left], block[left]
    return tuple(levels)


class _Sequence:
    """The layout of the keys of one sequence."""

    def __init__(self, span: Span, group: int, window: int | None, page_size: int) -> None:
        graph, table = span.graph, span.table
        self.graph, self.group, self.window = graph, group, window
        self.queries = np.arange(span.first, len(graph))
        self.shift = span.row - span.first
        index = np.arange(len(table))
        positions = np.asarray(table.positions, dtype=np.int64)
        pages = np.asarray(table.pages, dtype=np.int64)
        slots = pages[index // page_size] * page_size + index % page_size
        if table.stale:
            fresh = index < len(table) - table.stale
            fresh |= ~np.isin(positions, graph.positions)
            positions, slots = positions[fresh], slots[fresh]
        self.positions, self.slots, self.node_slots = positions, slots, np.asarray(span.slots)
        top = max(int(positions.max(initial=0)), int(graph.positions.max(initial=0)))
        self.size = top // KEYS + 1
        """How many ordinary blocks there are."""

    def build(self, into: _Builder) -> None:
        claims = np.bincount(np.concatenate([self.positions, self.graph.positions]))
        if claims.max() <= 1:
            self._shared(into)
        else:
            self._by_path(into)

    def _sees(self, nodes: IntArray, owner: IntArray, places: IntArray) -> BoolArray:
        """[nodes, blocks, KEYS]: what each node sees of keys with these owners and positions."""
        seen = np.empty((len(nodes), *owner.shape), dtype=np.bool_)
        seen[:] = owner == _CONTEXT
        at = np.nonzero(owner >= 0)
        if len(at[0]):
            others = owner[at]
            if self.graph.is_chain:
                seen[:, at[0], at[1]] = others <= nodes[:, None]
            else:
                seen[:, at[0], at[1]] = self.graph.sees[np.ix_(nodes, others)]
        if self.window == SKIP_FIRST:
            seen &= places > 0
        elif self.window is not None:
            seen &= places > (self.graph.positions[nodes] - self.window)[:, None, None]
        return seen

    def _tiles(
        self,
        into: _Builder,
        nodes: IntArray,
        lanes: IntArray,
        owner: IntArray,
        places: IntArray,
        blocks: IntArray,
        *,
        units: bool,
    ) -> None:
        if not len(blocks):
            return
        heads = np.arange(self.group)
        rows = ((nodes + self.shift)[:, None] * self.group + heads).reshape(-1)
        for start in range(0, len(rows), ROWS):
            stop = min(start + ROWS, len(rows))
            low, high = start // self.group, (stop - 1) // self.group + 1
            seen = self._sees(nodes[low:high], owner, places)
            spread = np.arange(start, stop) // self.group - low
            into.tile(rows[start:stop], lanes, seen[spread], blocks)
            if units:
                into.close_unit()

    def _context_lanes(self) -> tuple[IntArray, IntArray, IntArray]:
        """[blocks, KEYS] slots and owners of the first key at each position; indices of the others."""
        lanes = np.zeros(self.size * KEYS, dtype=np.int64)
        owner = np.full(self.size * KEYS, _UNUSED)
        kept, first = np.unique(self.positions, return_index=True)
        lanes[kept], owner[kept] = self.slots[first], _CONTEXT
        late = np.setdiff1d(np.arange(len(self.positions)), first)
        return lanes.reshape(-1, KEYS), owner.reshape(-1, KEYS), late

    def _shared(self, into: _Builder) -> None:
        """One layout for all queries."""
        lanes, owner = (
            np.zeros(self.size * KEYS, dtype=np.int64),
            np.full(self.size * KEYS, _UNUSED),
        )
        lanes[self.positions], owner[self.positions] = self.slots, _CONTEXT
        lanes[self.graph.positions] = self.node_slots
        owner[self.graph.positions] = np.arange(len(self.graph))
        blocks = np.arange(self.size)
        places = np.arange(self.size * KEYS).reshape(-1, KEYS)
        self._tiles(
            into,
            self.queries,
            lanes.reshape(-1, KEYS),
            owner.reshape(-1, KEYS),
            places,
            blocks,
            units=True,
        )

    def _paths(self, ambiguous: BoolArray) -> list[tuple[int, IntArray]]:
        """Groups of queries, each with the node that sees everything that the group sees.

        An ambiguous node, which sees two keys at one position, is a group of its own.
        """
        sees = self.graph.sees
        left = np.zeros(len(self.graph), dtype=np.bool_)
        left[self.queries] = True
        groups = []
        for node in self.queries[::-1]:
            if not left[node]:
                continue
            if ambiguous[node]:
                nodes = np.asarray([node])
            else:
                inside = ~(sees & ~sees[node]).any(axis=1)
                nodes = np.flatnonzero(left & inside)
            left[nodes] = False
            groups.append((int(node), nodes))
        return groups[::-1]

    def _by_path(self, into: _Builder) -> None:
        """Shared blocks where there is only context; around the graph, one layout per path."""
        graph = self.graph
        lanes, owner, late = self._context_lanes()
        places = np.arange(self.size * KEYS).reshape(-1, KEYS)
        near = np.unique(graph.positions // KEYS)
        far = np.setdiff1d(np.arange(self.size), near)
        ambiguous = np.zeros(len(graph), dtype=np.bool_)
        for node in self.queries:
            seen = graph.positions[np.flatnonzero(graph.sees[node])]
            ambiguous[node] = (
                len(late) > 0
                or len(np.unique(seen)) < len(seen)
                or bool((owner.reshape(-1)[seen] == _CONTEXT).any())
            )
        pending: list[IntArray] = []

        def finish() -> None:
            if pending:
                nodes = np.concatenate(pending)
                self._tiles(into, nodes, lanes[far], owner[far], places[far], far, units=False)
                pending.clear()
                into.close_unit()

        for last, nodes in self._paths(ambiguous):
            self._path_tiles(into, last, nodes, lanes, owner, late, near)
            pending.append(nodes)
            rows = sum(len(p) for p in pending) * self.group
            if into.count + (rows // ROWS + 1) * len(far) >= into.limit:
                finish()
        finish()

    def _path_tiles(
        self,
        into: _Builder,
        node: int,
        nodes: IntArray,
        lanes: IntArray,
        owner: IntArray,
        late: IntArray,
        near: IntArray,
    ) -> None:
        graph = self.graph
        lanes, owner = lanes[near], owner[near]
        flat_lanes, flat_owner = lanes.reshape(-1), owner.reshape(-1)
        places = near[:, None] * KEYS + np.arange(KEYS)
        seen = np.flatnonzero(graph.sees[node])
        spilled = []
        for other in seen:
            position = int(graph.positions[other])
            lane = int(np.searchsorted(near, position // KEYS)) * KEYS + position % KEYS
            if flat_owner[lane] == _UNUSED:
                flat_lanes[lane], flat_owner[lane] = self.node_slots[other], other
            else:
                spilled.append((position, 1, int(other), int(self.node_slots[other]), int(other)))
        for i in late:
            spilled.append((int(self.positions[i]), 0, int(i), int(self.slots[i]), _CONTEXT))
        self._tiles(into, nodes, lanes, owner, places, near, units=False)
        if spilled:
            spilled.sort()
            top = max(int(self.positions.max(initial=0)), int(graph.positions[seen].max()))
            size = -(-len(spilled) // KEYS)
            lanes, owner = np.zeros(size * KEYS, dtype=np.int64), np.full(size * KEYS, _UNUSED)
            places = np.zeros(size * KEYS, dtype=np.int64)
            places[: len(spilled)] = [key[0] for key in spilled]
            lanes[: len(spilled)] = [key[3] for key in spilled]
            owner[: len(spilled)] = [key[4] for key in spilled]
            self._tiles(
                into,
                nodes,
                lanes.reshape(-1, KEYS),
                owner.reshape(-1, KEYS),
                places.reshape(-1, KEYS),
                top // KEYS + 1 + np.arange(size),
                units=False,
            )


def plan(
    spans: Sequence[Span], *, group: int, kv_heads: int, window: int | None, page_size: int
) -> AttentionPlan:
    """The plan of a pass over these spans, for layers with this window.

    group: how many query heads share a KV head. window: how many positions back layers attend;
      None: all.
    """
    builder = _Builder(limit=max(1, PAIRS // kv_heads))
    for span in spans:
        if span.first < len(span.graph):
            _Sequence(span, group, window, page_size).build(builder)
    builder.flush()
    return AttentionPlan(tuple(builder.chunks))
