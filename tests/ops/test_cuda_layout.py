"""The description of a pass for a card, read back as the kernels read it: no card is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from outstride.core.graph import IntArray, TokenGraph, block, chain, tree, union
from outstride.core.sequence import Table
from outstride.ops.contract import Span
from outstride.ops.cuda.layout import DEEP, FIELDS, HEADER, KEYS, LEVEL, Card, Layout, Pace
from outstride.ops.cuda.relay import ITEMS, ITEMS_AT, NODES, PAGES_AT, SHIFT, SLACK, Mould
from outstride.ops.cuda.steps import Steps
from outstride.ops.cuda.tiles import Describer

PAGE, POOL = 16, 400
CARD = Card(
    group=3, kv_heads=2, wide=64, page_size=PAGE, spare=POOL * PAGE, programs=64, room=1 << 16
)


def read(layout: Layout, window: int, size: int | None) -> dict[int, list[int]]:
    """The slots that each row attends to; no block of a row is taken twice, and none is left out."""
    words, begin = layout.words, layout.windows[window]
    stop = layout.windows[window + 1] if window + 1 < len(layout.windows) else layout.end
    items = words[begin:stop].reshape(-1, FIELDS)
    count = int(np.count_nonzero(items[:, 1]))
    assert not items[count:, 1].any()
    # every program must come upon an item without nodes at last
    assert len(items) * CARD.kv_heads > count * CARD.kv_heads + layout.programs
    keys: dict[int, list[int]] = {}
    blocks: dict[int, list[int]] = {}
    spots: set[tuple[int, int]] = set()
    pieces: dict[int, int] = {}
    for item in items[:count].tolist():
        row, nodes, pages, lists, start, end, first, last, parts, base, ticket = item[:11]
        limit, place, shift, tile_row, tile_nodes = item[11:]
        assert nodes <= layout.tile // CARD.group
        assert tile_row + shift == row
        assert shift + nodes <= tile_nodes
        pieces[ticket] = pieces.get(ticket, 0) + 1
        assert parts > 0
        for b in range(start, end):
            listed_at = int(words[lists + b]) if lists >= 0 else -1
            for node in range(nodes):
                spot = base + b - first
                assert (spot, shift + node) not in spots
                spots.add((spot, shift + node))
                blocks.setdefault(row + node, []).append(b)
                top = limit if lists == LEVEL else limit + node
                for lane in range(KEYS):
                    position = b * KEYS + lane
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
        if not layout.splits:
            assert (parts, start, end) == (1, first, last)
    for item in items[:count].tolist():
        assert pieces[item[10]] == item[8]
    for row, found in blocks.items():
        assert len(set(found)) == len(found), row
    return {row: sorted(found) for row, found in keys.items()}


def right(spans: list[Span], size: int | None) -> dict[int, list[int]]:
    """The same from graphs and tables."""
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
    "rivals": lambda source, at: union(chain([3, 4], at), block([5, 6], at), chain([7], at)),
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
    table = Table(pages, list(range(at)), stale=min(stale, at))
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


def check(describe: Describer, spans: list[Span], windows: tuple[int | None, ...]) -> Layout:
    rows = -(-spans[-1].rows.stop // 16) * 16
    layout = describe(spans, windows, rows)
    for i, size in enumerate(windows):
        assert read(layout, i, size) == right(spans, size)
    table = layout.words[HEADER : HEADER + 3 * rows].reshape(3, rows)
    stop = spans[-1].rows.stop
    for field, name in enumerate(("tokens", "positions")):
        every = [getattr(s.graph, name)[s.first :] for s in spans]
        assert table[field, :stop].tolist() == np.concatenate(every).tolist()
    assert table[2, :stop].tolist() == np.concatenate([s.slots[s.first :] for s in spans]).tolist()
    assert (table[2, stop:] == CARD.spare).all()
    return layout


@pytest.mark.parametrize("windows", [(None,), (24,), (None, 24)])
@pytest.mark.parametrize("kind", GRAPHS)
def test_one_sequence(kind: str, windows: tuple[int | None, ...]) -> None:
    source, describe = np.random.default_rng(7), Describer(CARD)
    for at in (0, 1, 100, 127, 128, 129, 250):
        check(describe, [span(source, kind, at, 0)], windows)
        check(describe, [span(source, kind, at, 0, first=1)], windows)


def test_stale_entries_give_way() -> None:
    source = np.random.default_rng(8)
    for kind in ("block", "tree"):
        check(Describer(CARD), [span(source, kind, 150, 0, stale=9)], (None,))


def test_everybody_together() -> None:
    source, describe = np.random.default_rng(9), Describer(CARD)
    for _ in range(6):
        kinds = [str(kind) for kind in source.choice(list(GRAPHS), size=4)]
        check(describe, batch(source, kinds), (None, 40))


def test_no_room_for_partial_results() -> None:
    """Then no tile's blocks are shared out, whatever the graphs."""
    source = np.random.default_rng(10)
    for kinds in (["tree"], ["tree", "chain", "step"]):
        layout = check(Describer(replace(CARD, room=40)), batch(source, kinds), (None,))
        assert not layout.splits


@pytest.mark.parametrize("window", [None, 24, 130])
def test_a_sequence_goes_on_in_a_mould(window: int | None) -> None:
    """What is kept from earlier passes is the same as what is worked out anew."""
    source, describe = np.random.default_rng(11), Describer(CARD)
    for kind in ("tree", "chain", "block"):
        for at in range(90, 340, 3):
            fresh = np.random.default_rng(12)  # as many nodes each time
            check(describe, [span(fresh, kind, at, 0)], (window,))
    assert len(describe._moulds) < 100
    nodes = chain(source.integers(90, size=20), 128)
    pages = list(range(30))
    for shape in (nodes, tree(nodes.tokens, [-1] * 20, 128)):
        table, slots = Table(pages, list(range(128))), np.arange(128, 148)
        for _ in range(2):
            check(describe, [Span(shape, slots, table, 0, 0)], (window,))


def test_keys_that_all_nodes_share_are_read_together() -> None:
    """Sixty nodes of a tree behind a long context take few items more than there are nodes."""
    source = np.random.default_rng(13)
    parents = [-1] + [int(source.integers(0, i)) for i in range(1, 60)]
    graph, context = tree(list(range(60)), parents, 1024), list(range(1024))
    one = Span(graph, np.arange(1024, 1084), Table(list(range(80)), context), 0, 0)
    layout = check(Describer(CARD), [one], (None,))
    items = layout.words[layout.windows[0] : layout.end].reshape(-1, FIELDS)
    assert (items[:, 3] >= 0).sum() == 60
    work = (items[:, 5] - items[:, 4]).sum()
    assert work == 60 + 12 * 8  # five nodes to a tile, eight blocks of context


def test_tiles_are_large_where_keys_would_be_read_too_often() -> None:
    """Sixty nodes behind a long context, not behind a short one, and not a few."""
    source = np.random.default_rng(14)
    for nodes, context, tile in ((60, 1024, 64), (60, 40, 16), (5, 1024, 16), (100, 40, 64)):
        graph, pages = chain(source.integers(90, size=nodes), context), list(range(80))
        entries = np.arange(context, context + nodes)
        one = Span(graph, entries, Table(pages, list(range(context))), 0, 0)
        layout = check(Describer(CARD), [one], (None,))
        assert layout.tile == tile
        items = layout.words[layout.windows[0] : layout.end].reshape(-1, FIELDS)
        live = items[items[:, 1] > 0]
        assert (layout.deep is Pace.ONCE) == (
            len(live) * CARD.kv_heads <= layout.programs and (live[:, 5] - live[:, 4]).max() < DEEP
        )
        # one run of each tile begins with its first block: it stands for the tile
        assert len({*live[:, 10].tolist()}) == (live[:, 4] == live[:, 6]).sum()


# --- steps ------------------------------------------------------------------------------------------


def steps(source: np.random.Generator, count: int) -> tuple[Steps, list[Span]]:
    spans = [span(source, "step", int(source.integers(1, 300)), row) for row in range(count)]
    made = Steps.of(spans, PAGE)
    assert made is not None
    return made, spans


def test_steps_are_described_alike() -> None:
    made, spans = steps(np.random.default_rng(14), 12)
    assert read(made.layout((None,), 16, CARD), 0, None) == right(spans, None)


@pytest.mark.parametrize("rows", [list(range(12)), [3, 1, 7]])
def test_the_pass_behind_in_a_mould(rows: list[int]) -> None:
    """Words taken over from the pass before are those that are worked out anew."""
    made, _ = steps(np.random.default_rng(15), 12)
    made.layout((None,), 16, CARD)
    kept = 0
    for _ in range(40):
        following = made.following(rows, CARD, 4096)
        assert following is not None
        kept += following.mould is not None
        moulded = following.layout((None,), 16, CARD)
        anew = replace(following, mould=None).layout((None,), 16, CARD)
        assert np.array_equal(moulded.words, anew.words)
        assert (moulded.programs, moulded.deep) == (anew.programs, anew.deep)
        for row, slot in following.staged.items():  # its page comes
            following.pages[following.at[row] + len(following.held[row])] = slot // PAGE
            following.held[row] = [*following.held[row], slot // PAGE]
        made, rows = replace(following, staged={}), list(range(len(rows)))
        if kept > 30:
            break
    assert kept > 20


def described(mould: Mould, context: int, pages: list[int]) -> Layout:
    """Eight nodes behind `context` entries, or up to seven fewer."""
    form = mould.form(mould.key(context, 7, 8), context, 16)
    assert form is not None
    return replace(form.layout, words=form.words(context, pages, 0))


def moved_back(layout: Layout, held: int) -> None:
    """What the card does to a pass that was described as if all of a chain had held."""
    words, rows = layout.words, layout.rows
    nodes, back = int(words[NODES]), held - int(words[SLACK]) + int(words[SHIFT])
    places = words[HEADER + rows : HEADER + rows + nodes]
    places += back
    pages = words[int(words[PAGES_AT]) :]
    words[HEADER + 2 * rows : HEADER + 2 * rows + nodes] = (
        pages[places // PAGE] * PAGE + places % PAGE
    )
    at = int(words[ITEMS_AT])
    words[at : at + int(words[ITEMS]) * FIELDS].reshape(-1, FIELDS)[:, 11:13] += back


@pytest.mark.parametrize("size", [None, 40, 512])
@pytest.mark.parametrize("level", [False, True])
def test_a_pass_moved_back_is_the_pass_at_that_place(level: bool, size: int | None) -> None:
    """Over hundreds of contexts, so across blocks and pages, and from the same mould."""
    source = np.random.default_rng(7)
    mould, slack, nodes = Mould((size,), CARD, level=level), 7, 8
    pages = [int(page) for page in source.permutation(POOL)[:60]]
    context = 100
    while context < 700:
        made = described(mould, context + slack, pages)
        held = int(source.integers(slack + 1))
        moved_back(made, held)
        at = context + held
        entries = np.arange(at, at + nodes)
        slots = np.asarray(pages)[entries // PAGE] * PAGE + entries % PAGE
        graph = block([5] * nodes, at) if level else chain([5] * nodes, at)
        there = Span(graph, slots, Table(pages, list(range(at))), 0, 0)
        assert read(made, 0, size) == right([there], size)
        words = made.words
        assert words[HEADER + 16 : HEADER + 16 + nodes].tolist() == entries.tolist()
        assert words[HEADER + 32 : HEADER + 32 + nodes].tolist() == slots.tolist()
        context += held + 1


def test_a_pass_moved_back_too_far_would_be_noticed() -> None:
    mould, pages = Mould((None,), CARD, level=False), list(range(40))
    made = described(mould, 307, pages)
    moved_back(made, 2)
    there = Span(chain([5] * 8, 303), np.arange(303, 311), Table(pages, list(range(303))), 0, 0)
    assert read(made, 0, None) != right([there], None)
