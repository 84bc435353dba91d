"""The keys of nodes: compiled and by hand alike, and both what the graph says."""

from __future__ import annotations

import numpy as np
import pytest

from outstride.core import host_library
from outstride.core.graph import TokenGraph, block, chain, tree, union
from outstride.core.sequence import BlockTable
from outstride.ops.contract import Span
from outstride.ops.cpu.attention_metadata import CpuAttentionMetadata
from outstride.ops.weights import SKIP_FIRST

PAGE = 16
WINDOWS = (None, 6, SKIP_FIRST)

needs_host = pytest.mark.skipif(host_library.library() is None, reason="nothing was compiled")


def some_graph(rng: np.random.Generator, start: int) -> TokenGraph:
    """A chain, a tree, a block, or something put together from them."""

    def drafted(size: int, at: int) -> TokenGraph:
        parents = [int(rng.integers(-1, i)) for i in range(size)]
        return tree(rng.integers(0, 9, size), parents, at)

    given = chain(rng.integers(0, 9, int(rng.integers(1, 4))), start)
    end, kind = start + len(given), int(rng.integers(0, 6))
    if kind == 0:
        return given
    if kind == 1:
        return given.grow(drafted(int(rng.integers(1, 40)), end))
    if kind == 2:
        return block(rng.integers(0, 9, 7).tolist(), start)
    if kind == 3:
        siblings = union(drafted(5, end), block([1, 2, 3], end), chain([4, 5], end + 2))
        return given.grow(siblings)
    if kind == 4:  # a gap, and positions out of order
        return given.grow(chain([1, 2, 3], positions=[end + 4, end + 1, end + 9]))
    return given.grow(block([1, 2, 3], end)).grow(drafted(6, end + 3))


def some_spans(rng: np.random.Generator) -> list[Span]:
    """Sequences of all kinds side by side, each with pages of its own in any order."""
    pages, spans, row = rng.permutation(400).tolist(), list[Span](), 0
    for _ in range(int(rng.integers(1, 5))):
        kept = int(rng.integers(0, 50))
        graph = some_graph(rng, kept)
        mine = [pages.pop() for _ in range(-(-(kept + len(graph)) // PAGE))]
        entries = np.arange(kept, kept + len(graph))
        slots = np.asarray(mine)[entries // PAGE] * PAGE + entries % PAGE
        places, ordered = list(range(kept)), True
        if kept > 2 and rng.random() < 0.2:
            places[-1], places[-2], ordered = places[-2], places[-1], False
        table = BlockTable(mine, places, ordered=ordered)
        first = int(rng.integers(0, len(graph))) if rng.random() < 0.3 else 0
        spans.append(Span(graph, slots, table, first, row))
        row += len(graph) - first
    return spans


def seen(layout: CpuAttentionMetadata, window: int | None, row: int) -> list[int]:
    """The slots whose keys a row reads, by what the tables tell the kernels."""
    node = layout.nodes[window][row]
    assert node["row"] == row
    found = []
    for key in range(int(node["start"]), int(node["count"])):
        if key < node["direct"]:
            page = int(layout.pages[node["pages"] + key // PAGE])
            found.append(page * PAGE + key % PAGE)
        else:
            found.append(int(layout.tails[node["tail"] + key - node["direct"]]))
    return found


@needs_host
@pytest.mark.parametrize("seed", range(60))
def test_compiled_as_by_hand(seed: int) -> None:
    spans = some_spans(np.random.default_rng(seed))
    rows = spans[-1].rows.stop
    layouts = [
        CpuAttentionMetadata(256, WINDOWS, PAGE, lib) for lib in (host_library.library(), None)
    ]
    for layout in layouts:
        layout.fill(some_spans(np.random.default_rng(seed + 1000)))  # leaves something behind
        layout.fill(spans)
    one, other = layouts
    assert np.array_equal(one.positions[:rows], other.positions[:rows])
    assert np.array_equal(one.slots[:rows], other.slots[:rows])
    for window in WINDOWS:
        for row in range(rows):
            assert seen(one, window, row) == seen(other, window, row)


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_host), False])
@pytest.mark.parametrize("seed", range(20))
def test_what_the_graph_says(seed: int, compiled: bool) -> None:
    layout = CpuAttentionMetadata(256, (None,), PAGE, host_library.library() if compiled else None)
    spans = some_spans(np.random.default_rng(seed))
    layout.fill(spans)
    for span in spans:
        pages = np.asarray(span.table.pages)
        cached = [int(pages[i // PAGE]) * PAGE + i % PAGE for i in range(len(span.table))]
        for node in range(span.first, len(span.graph)):
            own = span.slots[span.graph.sees[node]].tolist()
            found = [slot for slot in seen(layout, None, span.row + node - span.first) if slot >= 0]
            assert sorted(found) == sorted([*cached, *own])


@needs_host
def test_a_list_that_outgrows_its_room() -> None:
    wide = chain([1], 0).grow(tree([2] * 250, np.arange(250) // 2 - 1, 1))
    slots = np.arange(len(wide))
    span = Span(wide, slots, BlockTable(list(range(16))), 0, 0)
    layouts = [
        CpuAttentionMetadata(256, (None,), PAGE, lib) for lib in (host_library.library(), None)
    ]
    for layout in layouts:
        layout.fill([span])
    one, other = ([seen(layout, None, row) for row in range(len(wide))] for layout in layouts)
    assert one == other


@needs_host
def test_arrays_that_do_not_fit_are_refused() -> None:
    lib = host_library.library()
    assert lib is not None
    with pytest.raises(ValueError, match="different sizes"):
        CpuAttentionMetadata(4, (None,), PAGE, lib).fill(
            [Span(chain([1] * 5), np.arange(5), BlockTable([0]), 0, 0)]
        )
    with pytest.raises(ValueError, match="different sizes"):
        CpuAttentionMetadata(8, (None,), PAGE, lib).fill(
            [Span(chain([1] * 5), np.arange(4), BlockTable([0]), 0, 0)]
        )
