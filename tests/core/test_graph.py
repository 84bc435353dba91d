"""Graphs: what nodes see follows from parents and blocks alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from outstride.core.contracts import accepted_nodes
from outstride.core.graph import (
    ROOT,
    Mixture,
    NodeId,
    alternatives,
    block,
    chain,
    drafted,
    empty,
    tree,
    union,
)


def seen(graph: object, node: int) -> list[int]:
    return np.flatnonzero(graph.sees[node]).tolist()  # type: ignore[attr-defined]


def test_chain() -> None:
    graph = chain([7, 8, 9], 4)
    assert graph.is_chain
    assert graph.positions.tolist() == [4, 5, 6]
    assert [seen(graph, i) for i in range(3)] == [[0], [0, 1], [0, 1, 2]]
    assert graph.path(NodeId(2)) == [0, 1, 2]


def test_tree() -> None:
    graph = chain([1, 2], 0).grow(tree([3, 4, 5, 6], [-1, -1, 0, 2], 2))
    assert graph.positions.tolist() == [0, 1, 2, 2, 3, 4]
    assert seen(graph, 5) == [0, 1, 2, 4, 5]
    assert seen(graph, 3) == [0, 1, 3]
    assert graph.children(NodeId(1)) == [2, 3]
    assert graph.follow(NodeId(1), 4) == 3
    assert graph.follow(NodeId(1), 9) is None
    assert not graph.is_linear


def test_blocks_see_themselves_and_their_ancestors() -> None:
    graph = chain([1], 0).grow(block([2, 3], 1)).grow(block([4, 5], 3))
    assert seen(graph, 1) == [0, 1, 2]
    assert seen(graph, 3) == [0, 1, 2, 3, 4]
    assert graph.is_linear
    assert not graph.is_chain


def test_alternatives_do_not_see_each_other() -> None:
    graph = chain([1], 0).grow(alternatives(block([2, 3], 1), block([4, 5], 1)))
    assert seen(graph, 2) == [0, 1, 2]
    assert seen(graph, 4) == [0, 3, 4]
    with pytest.raises(ValueError, match="same positions"):
        alternatives(block([1], 0), block([1], 1))


def test_union_and_mixtures() -> None:
    mixed = block([Mixture((1, 2), (0.5, 0.5)), 3], 0)
    graph = union(chain([1, 2], 0), mixed)
    assert seen(graph, 1) == [0, 1]
    assert seen(graph, 2) == [2, 3]
    assert list(graph.mixtures) == [2]
    assert graph.children(ROOT) == [0, 2, 3]
    assert len(union()) == len(empty()) == 0


def test_probes_are_never_followed() -> None:
    graph = chain([1], 0).grow(chain([5], 1, probe=True))
    assert graph.follow(NodeId(0), 5) is None


@pytest.mark.parametrize("parents", [[0], [-2], [-1, 2], [-1, -1, -1]])
def test_trees_need_parents_first(parents: list[int]) -> None:
    with pytest.raises(ValueError, match="parent"):
        tree([1, 2] if len(parents) == 2 else [1], parents, 0)


def test_accepted_nodes_leave_the_last_token_uncomputed() -> None:
    graph = chain([1, 2], 0).grow(tree([3, 9, 4, 5], [-1, -1, 0, 2], 2))
    assert accepted_nodes(graph, 2, [1, 2, 3, 4, 7]) == [0, 1, 2, 4]
    assert accepted_nodes(graph, 2, [1, 2, 3, 4]) == [0, 1, 2]
    assert accepted_nodes(graph, 2, [1, 2, 8]) == [0, 1]


def test_starts_with() -> None:
    graph = chain([1, 2], 0)
    longer = graph.grow(chain([3], 2))
    assert longer.starts_with(graph)
    assert not graph.starts_with(longer)
    assert not chain([1, 3, 3], 0).starts_with(graph)


@pytest.mark.parametrize("seed", range(10))
def test_a_part_sees_what_it_saw(seed: int) -> None:
    """In any graph: the remaining nodes see the same nodes as before and are unchanged."""
    rng = np.random.default_rng(seed)
    pieces = chain([1, 2], 0).grow(tree([3, 4, 5, 6], [-1, -1, 0, 1], 2), at=NodeId(1))
    soft = block([Mixture((1, 2), (0.5, 0.5)), 9], 2)
    graph = pieces.grow(soft, at=NodeId(3)).grow(chain([7, 8], 4), at=NodeId(int(seed % 8)))
    leaves = rng.choice(len(graph), 3)
    nodes = sorted({n for leaf in leaves for n in np.flatnonzero(graph.sees[leaf]).tolist()})
    part = graph.part(nodes)
    assert np.array_equal(part.sees, graph.sees[np.ix_(nodes, nodes)])
    for name in ("tokens", "positions", "probes"):
        assert np.array_equal(getattr(part, name), getattr(graph, name)[nodes]), name
    assert [nodes[n] for n in part.mixtures] == [n for n in graph.mixtures if n in nodes]
    for i, node in enumerate(nodes):
        assert [nodes[n] for n in part.path(NodeId(i))] == graph.path(NodeId(node))
    whole = graph.part(range(len(graph)))
    assert whole.starts_with(graph)
    assert np.array_equal(whole.sees, graph.sees)


def test_a_part_contains_all_nodes_that_it_sees() -> None:
    graph = chain([1], 0).grow(tree([2, 3, 4], [-1, 0, 0], 1))
    assert graph.part([0, 1, 3]).is_chain
    for nodes in ([0, 2], [1, 2, 3], [3]):
        with pytest.raises(ValueError, match="all nodes that its nodes see"):
            graph.part(nodes)
    for nodes in ([0, 3, 1], [0, 0], [-1, 0]):
        with pytest.raises(ValueError, match="rising order"):
            graph.part(nodes)
    with pytest.raises(ValueError, match="all nodes that its nodes see"):
        block([1, 2, 3]).part([0, 2])
    assert len(graph.part([])) == 0


@pytest.mark.parametrize("seed", range(10))
def test_drafted_equals_grow(seed: int) -> None:
    """The shortcut of most steps builds the same graph as `grow`."""
    rng = np.random.default_rng(seed)
    given = chain(rng.integers(0, 9, int(rng.integers(1, 4))), 7, probe=bool(seed % 2))
    size = int(rng.integers(1, 12))
    tokens = rng.integers(0, 9, size).tolist()
    parents = [int(rng.integers(-1, i)) for i in range(size)]
    start = 7 + len(given)
    one, other = drafted(given, tokens, parents, start), given.grow(tree(tokens, parents, start))
    for name in ("tokens", "positions", "parents", "probes", "sees", "depths"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert (one.is_chain, one.is_tree) == (other.is_chain, other.is_tree)
    with pytest.raises(ValueError, match="each before its child"):
        drafted(given, [1, 2], [-1, 1], start)


def test_cached_properties_equal_computed_ones() -> None:
    trees = [tree([1, 2, 3], parents, 0) for parents in ([-1, 0, 1], [-1, 0, 0], [-1, -1, 1])]
    for graph in (*trees, block([1]), block([1, 2]), chain([1, 2]).grow(trees[1])):
        anew = replace(graph)  # without what was said when it was made
        assert (graph.is_chain, graph.is_tree) == (anew.is_chain, anew.is_tree)
        assert np.array_equal(graph.depths, anew.depths)
