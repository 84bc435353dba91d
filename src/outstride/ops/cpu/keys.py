"""Which keys each node sees, by logical position: worked out once per pass for all layers.

A chain behind an ordered cache needs no list: its keys lie in the pages at their own positions. Only
what deviates from that (branches, blocks, entries kept out of order) is listed slot by slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outstride.core.graph import IntArray
from outstride.ops.contract import Span
from outstride.ops.cpu import native

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Keys:
    """`nodes` has one entry per row of the pass; `pages` and `tails` are what they point into."""

    nodes: npt.NDArray[np.void]
    pages: Ints
    tails: Ints
    positions: IntArray


def keys_of(spans: Sequence[Span], page_size: int) -> Keys:
    """The keys of all rows of a pass."""
    rows = spans[-1].rows.stop
    nodes = np.zeros(rows, dtype=native.NODE)
    nodes["row"] = np.arange(rows)
    positions = np.concatenate([s.graph.positions[s.first :] for s in spans])
    pages: list[int] = []
    tails: list[int] = []
    for span in spans:
        mine, table = nodes[span.rows], span.table
        mine["pages"] = len(pages)
        kept = len(table)
        in_order = table.ordered and not table.stale
        if in_order:
            pages += table.pages
        if in_order and _follows(span, kept):
            mine["count"] = mine["direct"] = span.graph.positions[span.first :] + 1
            continue
        if in_order and (lead := _branches(span, kept)):
            _paths(span, kept, lead, mine, tails)
            continue
        graph, sees = span.graph, span.graph.sees
        groups = list(zip(graph.blocks.tolist(), graph.parents.tolist(), strict=True))
        found: dict[tuple[int, int], tuple[int, int, int]] = {}
        for node in range(span.first, len(graph)):
            if (group := groups[node]) not in found:  # nodes of a block see the same
                seen = np.flatnonzero(sees[node])
                direct = _direct(span, seen, kept) if in_order else 0
                rest = _listed(span, seen, direct, page_size, 0 if in_order else kept)
                found[group] = direct, len(tails), direct + len(rest)
                tails += rest
            entry = mine[node - span.first]
            entry["direct"], entry["tail"], entry["count"] = found[group]
    return Keys(
        nodes,
        np.asarray(pages, dtype=np.int32),
        np.asarray(tails, dtype=np.int32),
        positions,
    )


def _follows(span: Span, kept: int) -> bool:
    """Whether the graph is a chain that goes on where the cache ends, slot by slot."""
    graph = span.graph
    return (
        graph.is_chain
        and bool(graph.positions[0] == kept)
        and bool(graph.positions[-1] == kept + len(graph) - 1)
        and bool((np.diff(graph.positions) == 1).all())
    )


def _branches(span: Span, kept: int) -> int:
    """How many leading nodes go on where the cache ends, if all others hang below them one by one.

    0: this graph has another shape.
    """
    graph = span.graph
    parents, positions = graph.parents, graph.positions
    if not graph.is_tree or positions[0] != kept or parents[0] >= 0:
        return 0
    if (parents[1:] < 0).any() or (positions[1:] != positions[parents[1:]] + 1).any():
        return 0
    lead = np.flatnonzero(parents != np.arange(-1, len(graph) - 1))
    return int(lead[0]) if len(lead) else len(graph)


def _paths(span: Span, kept: int, lead: int, nodes: npt.NDArray[np.void], tails: list[int]) -> None:
    """Each node sees the cache, leading nodes down to where its branch begins, and its branch."""
    parents, slots = span.graph.parents.tolist(), span.slots.tolist()
    direct, counts, starts = [], [], []
    for node in range(span.first, len(parents)):
        branch, above = [], node
        while above >= lead:
            branch.append(slots[above])
            above = parents[above]
        direct.append(kept + above + 1)
        counts.append(kept + above + 1 + len(branch))
        starts.append(len(tails))
        tails += branch[::-1]
    nodes["direct"], nodes["count"], nodes["tail"] = direct, counts, starts


def _direct(span: Span, seen: IntArray, kept: int) -> int:
    """How many leading positions of what a node sees lie in the pages in order."""
    count = 0
    positions = span.graph.positions
    for node in seen:
        if node != count or positions[node] != kept + count:
            break
        count += 1
    return kept + count


def _listed(span: Span, seen: IntArray, direct: int, page_size: int, context: int) -> list[int]:
    """Slots by position from `direct` on, -1 for gaps; a second entry at a position comes last."""
    table, positions = span.table, span.graph.positions
    entries: list[tuple[int, int]] = []
    if context:
        covered = set(positions.tolist())
        for i in range(context):
            place = table.positions[i]
            if i < table.fresh or place not in covered:
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
