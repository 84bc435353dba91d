"""The metadata of a pass, read back as the kernels read it: no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from outstride.core.graph import (
    MIXTURE,
    IntArray,
    Mixture,
    TokenGraph,
    block,
    chain,
    tree,
    union,
)
from outstride.core.sequence import BlockTable
from outstride.ops.contract import Span
from outstride.ops.cuda.batch_metadata import DEEP, AttentionGeometry, BatchMetadata, ProgramLoad
from outstride.ops.cuda.metadata import (
    BLOCK_KEYS,
    SAME_LIMIT,
    ItemField,
    RowField,
    item_table,
    num_live,
    row_table,
)
from outstride.ops.cuda.metadata_builder import MetadataBuilder

PAGE, POOL = 16, 400
GEOMETRY = AttentionGeometry(
    group=3,
    kv_heads=2,
    head_width=64,
    page_size=PAGE,
    spare_slot=POOL * PAGE,
    programs=64,
    max_partials=1 << 16,
)


def read(metadata: BatchMetadata, window: int, size: int | None) -> dict[int, list[int]]:
    """The slots that each row attends to; no block of a row is taken twice, and none is left out."""
    words, begin = metadata.words, metadata.windows[window]
    starts = (*metadata.windows, metadata.lists_at)
    items = item_table(words[begin : starts[window + 1]])
    count = num_live(items)
    assert not items[count:, ItemField.NUM_NODES].any()
    # every program must come upon an item without nodes at last
    assert len(items) * GEOMETRY.kv_heads > count * GEOMETRY.kv_heads + metadata.programs
    keys: dict[int, list[int]] = {}
    blocks: dict[int, list[int]] = {}
    spots: set[tuple[int, int]] = set()
    runs: dict[int, int] = {}
    for item in items[:count].tolist():
        row, nodes = item[ItemField.FIRST_ROW], item[ItemField.NUM_NODES]
        pages, lists = item[ItemField.PAGES], item[ItemField.BLOCK_LIST]
        start, end = item[ItemField.START_BLOCK], item[ItemField.STOP_BLOCK]
        first, last = item[ItemField.TILE_START_BLOCK], item[ItemField.TILE_STOP_BLOCK]
        num_runs, base, tile = (
            item[ItemField.NUM_RUNS],
            item[ItemField.PARTIALS],
            item[ItemField.TILE],
        )
        limit, place = item[ItemField.LIMIT], item[ItemField.POSITION]
        shift, tile_row = item[ItemField.TILE_NODE], item[ItemField.TILE_ROW]
        tile_nodes = item[ItemField.TILE_NODES]
        assert nodes <= metadata.tile // GEOMETRY.group
        assert tile_row + shift == row
        assert shift + nodes <= tile_nodes
        runs[tile] = runs.get(tile, 0) + 1
        assert num_runs > 0
        for b in range(start, end):
            listed_at = int(words[lists + b]) if lists >= 0 else -1
            for node in range(nodes):
                spot = base + b - first
                assert (spot, shift + node) not in spots
                spots.add((spot, shift + node))
                blocks.setdefault(row + node, []).append(b)
                top = limit if lists == SAME_LIMIT else limit + node
                for lane in range(BLOCK_KEYS):
                    position = b * BLOCK_KEYS + lane
                    if size is not None and position <= place + node - size:
                        continue
                    if listed_at >= 0:
                        slot = int(words[listed_at + lane])
                    elif position < top:
                        slot = int(words[pages + position // PAGE]) * PAGE + position % PAGE
                    else:
                        slot = -1
                    if slot >= 0:
                        keys.setdefault(row + node, []).append(slot)
        if not metadata.splits:
            assert (num_runs, start, end) == (1, first, last)
    for item in items[:count].tolist():
        assert runs[item[ItemField.TILE]] == item[ItemField.NUM_RUNS]
    for row, found in blocks.items():
        assert len(set(found)) == len(found), row
    return {row: sorted(found) for row, found in keys.items()}


def right(spans: list[Span], size: int | None) -> dict[int, list[int]]:
    """The slots that each row should attend to, from graphs and block tables."""
    keys: dict[int, list[int]] = {}
    for span in spans:
        table, graph = span.table, span.graph
        for node in range(span.first, len(graph)):
            floor = -1 if size is None else int(graph.positions[node]) - size
            seen = []
            for entry, position in enumerate(table.positions):
                slot = table.pages[entry // PAGE] * PAGE + entry % PAGE
                stale = entry >= len(table) - table.stale
                if position > floor and not (stale and position in graph.positions):
                    seen.append(slot)
            for other in np.flatnonzero(graph.sees[node]).tolist():
                if graph.positions[other] > floor:
                    seen.append(int(span.slots[other]))
            keys[span.row + node - span.first] = sorted(seen)
    return keys


def random_tree(source: np.random.Generator, at: int) -> TokenGraph:
    count = int(source.integers(2, 40))
    parents = [-1] + [int(source.integers(max(0, i - 5), i)) for i in range(1, count)]
    return tree(source.integers(90, size=count), parents, at)


def given_and_tree(source: np.random.Generator, at: int) -> TokenGraph:
    given = int(source.integers(1, 20))
    return chain(list(range(given)), at).grow(random_tree(source, at + given))


GRAPHS: dict[str, Callable[[np.random.Generator, int], TokenGraph]] = {
    "step": lambda source, at: chain([5], at),
    "chain": lambda source, at: chain(source.integers(90, size=source.integers(2, 70)), at),
    "tree": random_tree,
    "given": given_and_tree,
    "block": lambda source, at: block(list(range(int(source.integers(1, 30)))), at),
    "siblings": lambda source, at: union(chain([3, 4], at), block([5, 6], at), chain([7], at)),
    "probes": lambda source, at: chain([5, 6], positions=[max(at - 30, 0), at]),
    "twins": lambda source, at: block([5, 6, 7, 8], positions=[at, at + 1, at, at + 1]),
    "far": lambda source, at: chain([5, 6], positions=[at, at + 2000]),
}


def span(
    source: np.random.Generator, kind: str, at: int, row: int, *, first: int = 0, stale: int = 0
) -> Span:
    graph = GRAPHS[kind](source, at)
    first = min(first, len(graph) - 1)
    size = (at + len(graph)) // PAGE + 1
    pages = [int(page) for page in source.permutation(POOL)[:size]]
    table = BlockTable(pages, list(range(at)), stale=min(stale, at))
    entries = np.arange(at - table.stale, at - table.stale + len(graph))
    slots: IntArray = np.asarray(pages)[entries // PAGE] * PAGE + entries % PAGE
    return Span(graph, slots, table, first, row)


def batch(source: np.random.Generator, kinds: list[str], **options: int) -> list[Span]:
    spans, row = [], 0
    for kind in kinds:
        made = span(source, kind, int(source.integers(0, 300)), row, **options)
        spans.append(made)
        row = made.rows.stop
    return spans


def check(
    build: MetadataBuilder, spans: list[Span], windows: tuple[int | None, ...]
) -> BatchMetadata:
    rows = -(-spans[-1].rows.stop // 16) * 16
    metadata = build(spans, windows, rows)
    for i, size in enumerate(windows):
        assert read(metadata, i, size) == right(spans, size)
    table, stop = row_table(metadata.words, rows), spans[-1].rows.stop
    for field, name in ((RowField.TOKEN, "tokens"), (RowField.POSITION, "positions")):
        every = [getattr(s.graph, name)[s.first :] for s in spans]
        assert table[field, :stop].tolist() == np.concatenate(every).tolist()
    slots = table[RowField.SLOT]
    assert slots[:stop].tolist() == np.concatenate([s.slots[s.first :] for s in spans]).tolist()
    assert (slots[stop:] == GEOMETRY.spare_slot).all()
    return metadata


@pytest.mark.parametrize("windows", [(None,), (24,), (None, 24)])
@pytest.mark.parametrize("kind", GRAPHS)
def test_one_sequence(kind: str, windows: tuple[int | None, ...]) -> None:
    source, build = np.random.default_rng(7), MetadataBuilder(GEOMETRY)
    for at in (0, 1, 100, 127, 128, 129, 250):
        check(build, [span(source, kind, at, 0)], windows)
        check(build, [span(source, kind, at, 0, first=1)], windows)


def test_stale_kv_gives_way() -> None:
    source = np.random.default_rng(8)
    for kind in ("block", "tree"):
        check(MetadataBuilder(GEOMETRY), [span(source, kind, 150, 0, stale=9)], (None,))


def test_all_kinds_in_one_pass() -> None:
    source, build = np.random.default_rng(9), MetadataBuilder(GEOMETRY)
    for _ in range(6):
        kinds = [str(kind) for kind in source.choice(list(GRAPHS), size=4)]
        check(build, batch(source, kinds), (None, 40))


def test_no_space_for_partial_results() -> None:
    """Then no tile's blocks are shared out, whatever the graphs."""
    source = np.random.default_rng(10)
    for kinds in (["tree"], ["tree", "chain", "step"]):
        metadata = check(
            MetadataBuilder(replace(GEOMETRY, max_partials=40)), batch(source, kinds), (None,)
        )
        assert not metadata.splits


@pytest.mark.parametrize("window", [None, 24, 130])
def test_templates_of_a_sequence(window: int | None) -> None:
    """Metadata from a template is the same as what is worked out anew."""
    source, build = np.random.default_rng(11), MetadataBuilder(GEOMETRY)
    for kind in ("tree", "chain", "block"):
        for at in range(90, 340, 3):
            fresh = np.random.default_rng(12)  # as many nodes each time
            check(build, [span(fresh, kind, at, 0)], (window,))
    assert len(build._templates) < 100
    nodes = chain(source.integers(90, size=20), 128)
    pages = list(range(30))
    for shape in (nodes, tree(nodes.tokens, [-1] * 20, 128)):
        table, slots = BlockTable(pages, list(range(128))), np.arange(128, 148)
        for _ in range(2):
            check(build, [Span(shape, slots, table, 0, 0)], (window,))


def test_a_mixture_reads_no_embedding_before_the_first() -> None:
    """Nor in metadata from a template: its token is -1, and that row does not exist."""
    build, table = MetadataBuilder(GEOMETRY), BlockTable(list(range(9)), list(range(100)))
    nodes = replace(chain([5, MIXTURE, 7], 100), mixtures={1: Mixture((5, 6), (0.5, 0.5))})
    for _ in range(2):
        made = build([Span(nodes, np.arange(100, 103), table, 0, 0)], (None,), 16)
        assert row_table(made.words, 16)[RowField.TOKEN, :3].tolist() == [5, 0, 7]
    assert len(build._templates) == 1


def test_keys_that_all_nodes_share_are_read_together() -> None:
    """Sixty nodes of a tree after a long context take few items more than there are nodes."""
    source = np.random.default_rng(13)
    parents = [-1] + [int(source.integers(0, i)) for i in range(1, 60)]
    graph, context = tree(list(range(60)), parents, 1024), list(range(1024))
    one = Span(graph, np.arange(1024, 1084), BlockTable(list(range(80)), context), 0, 0)
    metadata = check(MetadataBuilder(GEOMETRY), [one], (None,))
    items = metadata.live_items()
    assert (items[:, ItemField.BLOCK_LIST] >= 0).sum() == 60
    work = (items[:, ItemField.STOP_BLOCK] - items[:, ItemField.START_BLOCK]).sum()
    assert work == 60 + 12 * 8  # five nodes to a tile, eight blocks of context


def test_tiles_are_large_where_keys_would_be_read_too_often() -> None:
    """Sixty nodes after a long context, not after a short one, and not a few nodes."""
    source = np.random.default_rng(14)
    for nodes, context, tile in ((60, 1024, 64), (60, 40, 16), (5, 1024, 16), (100, 40, 64)):
        graph, pages = chain(source.integers(90, size=nodes), context), list(range(80))
        entries = np.arange(context, context + nodes)
        one = Span(graph, entries, BlockTable(pages, list(range(context))), 0, 0)
        metadata = check(MetadataBuilder(GEOMETRY), [one], (None,))
        assert metadata.tile == tile
        items = metadata.live_items()
        starts = items[:, ItemField.START_BLOCK]
        longest = (items[:, ItemField.STOP_BLOCK] - starts).max()
        few = len(items) * GEOMETRY.kv_heads <= metadata.programs
        assert (metadata.load is ProgramLoad.ONCE) == (few and longest < DEEP)
        # one run of each tile begins with its first block: it folds the tile
        first_runs = (starts == items[:, ItemField.TILE_START_BLOCK]).sum()
        assert len({*items[:, ItemField.TILE].tolist()}) == first_runs
