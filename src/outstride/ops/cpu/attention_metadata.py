"""Attention metadata: which keys each node attends to, computed once per pass for all layers.

A chain after an ordered KV cache needs no list: its keys are in the pages at their own positions. Only
what deviates from that (branches, blocks, KV kept out of order) is listed slot by slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import numpy.typing as npt

from outstride.core.graph import IntArray
from outstride.ops.contract import Span
from outstride.ops.cpu import native
from outstride.ops.weights import SKIP_FIRST

Ints = npt.NDArray[np.int32]
ALL = 0
"""The window of layers with full attention, in compiled code."""


class CpuAttentionMetadata:
    """The position, slot and keys of each row of a pass, in buffers that never move.

    `nodes` has one table [rows] per sliding window. Its rows point into `pages` and `tails`, which are
    rebuilt for each pass and may grow. With the compiled host library, spans are filled in by it.
    """

    def __init__(
        self, rows: int, windows: Sequence[int | None], page_size: int, lib: ModuleType | None
    ) -> None:
        self.positions = np.zeros(rows, dtype=np.int64)
        self.slots = np.zeros(rows, dtype=np.int64)
        self.nodes = {
            window: np.zeros(rows, dtype=native.NODE) for window in dict.fromkeys(windows)
        }
        self.pages: Ints = np.zeros(0, dtype=np.int32)
        self.tails: Ints = np.zeros(1024, dtype=np.int32)
        self._listed = 0
        self._page_size = page_size
        self._lib = lib
        self._tables = tuple(self.nodes.values())
        self._windows = tuple(ALL if window is None else window for window in self.nodes)

    def fill(self, spans: Sequence[Span]) -> None:
        """Fills in all rows of a pass."""
        pages: list[int] = []
        self._listed = 0
        for span in spans:
            table, page = span.table, len(pages)
            in_order = table.ordered and not table.stale
            if in_order:
                pages += table.pages
            if not (in_order and self._lib is not None and self._compiled(span, page, self._lib)):
                self._in_python(span, page, in_order=in_order)
        self.pages = np.array(pages, dtype=np.int32)

    def _compiled(self, span: Span, page: int, lib: ModuleType) -> bool:
        """Fills in a span after an ordered KV cache in compiled code; False if it cannot."""
        graph, row = span.graph, span.row
        slots = np.ascontiguousarray(span.slots, dtype=np.int64)
        positions = np.ascontiguousarray(graph.positions)
        while True:
            end: int = lib.keys(
                graph.parents,
                graph.blocks,
                positions,
                slots,
                span.first,
                len(span.table),
                row,
                page,
                self._tables,
                self._windows,
                self.positions,
                self.slots,
                self.tails,
                self._listed,
            )
            if end != -1:
                break
            self._grow(2 * len(self.tails))
        if end >= 0:
            self._listed = end
        return end >= 0

    def _grow(self, size: int) -> None:
        tails = np.zeros(size, dtype=np.int32)
        tails[: self._listed] = self.tails[: self._listed]
        self.tails = tails

    def _in_python(self, span: Span, page: int, *, in_order: bool) -> None:
        """Fills in any span, without compiled code."""
        rows, graph = span.rows, span.graph
        self.positions[rows] = graph.positions[span.first :]
        self.slots[rows] = span.slots[span.first :]
        first = self._tables[0][rows]
        first["row"] = np.arange(rows.start, rows.stop)
        first["pages"] = page
        tails = keys_of(span, self._page_size, first, self._listed, in_order=in_order)
        end = self._listed + len(tails)
        if end > len(self.tails):
            self._grow(2 * end)
        self.tails[self._listed : end] = tails
        self._listed = end
        for table, window in zip(self._tables, self._windows, strict=True):
            table[rows] = first
            if window == SKIP_FIRST:
                table["start"][rows] = 1
            elif window == ALL:
                table["start"][rows] = 0
            else:
                table["start"][rows] = np.maximum(self.positions[rows] - window + 1, 0)


def keys_of(
    span: Span, page_size: int, nodes: npt.NDArray[np.void], start: int, *, in_order: bool
) -> list[int]:
    """Writes a span's keys into its nodes; returns the slots that are listed from `start` on."""
    graph, kept = span.graph, len(span.table)
    if in_order and _follows(span, kept):
        nodes["count"] = nodes["direct"] = graph.positions[span.first :] + 1
        nodes["tail"] = 0
        return []
    sees, tails = graph.sees, list[int]()
    groups = list(zip(graph.blocks.tolist(), graph.parents.tolist(), strict=True))
    found: dict[tuple[int, int], tuple[int, int, int]] = {}
    for node in range(span.first, len(graph)):
        if (group := groups[node]) not in found:  # nodes of a block attend to the same keys
            seen = np.flatnonzero(sees[node])
            direct = _direct(span, seen, kept) if in_order else 0
            rest = _listed(span, seen, direct, page_size, 0 if in_order else kept)
            found[group] = direct, start + len(tails), direct + len(rest)
            tails += rest
        entry = nodes[node - span.first]
        entry["direct"], entry["tail"], entry["count"] = found[group]
    return tails


def _follows(span: Span, kept: int) -> bool:
    """Whether the graph is a chain that continues the KV cache slot by slot."""
    graph = span.graph
    return (
        graph.is_chain
        and bool(graph.positions[0] == kept)
        and bool(graph.positions[-1] == kept + len(graph) - 1)
        and bool((np.diff(graph.positions) == 1).all())
    )


def _direct(span: Span, seen: IntArray, kept: int) -> int:
    """How many leading positions that a node attends to are in the pages in order."""
    count = 0
    positions = span.graph.positions
    for node in seen:
        if node != count or positions[node] != kept + count:
            break
        count += 1
    return kept + count


def _listed(span: Span, seen: IntArray, direct: int, page_size: int, context: int) -> list[int]:
    """Slots by position from `direct` on, -1 for gaps; a second slot of a position comes last."""
    table, positions = span.table, span.graph.positions
    entries: list[tuple[int, int]] = []
    if context:
        covered = set(positions.tolist())
        for i in range(context):
            place = table.positions[i]
            if i < table.valid or place not in covered:
                slot = table.pages[i // page_size] * page_size + i % page_size
                entries.append((place, slot))
    entries += [(int(positions[n]), int(span.slots[n])) for n in seen if positions[n] >= direct]
    size = max((place for place, _ in entries), default=direct - 1) + 1 - direct
    slots, twice = [-1] * size, []
    for place, slot in entries:
        if slots[place - direct] < 0:
            slots[place - direct] = slot
        else:
            twice.append(slot)
    return slots + twice
