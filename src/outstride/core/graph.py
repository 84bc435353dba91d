"""`TokenGraph`: the nodes of one pass for one sequence, and which node attends to which.

A node has an input, a logical position, a parent and a block. What it sees follows from these
alone: everything the sequence has cached, its own block, and all that its parent sees. A chain is
a line of blocks of one node; a masked block is one block of many nodes; alternatives are blocks with
the same parent.

Graphs are built by `chain`, `tree`, `block`, `alternatives` and `union` and joined with `grow`.
Nothing else builds one, so masks, depths and paths are derived and never stated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NewType

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

NodeId = NewType("NodeId", int)
"""Index of a node in its graph. Never add one to a position."""
Position = NewType("Position", int)
"""Logical position of a token in its sequence, counted from the first prompt token."""
TokenId = NewType("TokenId", int)
"""A row of the vocabulary; from `vocab_size` on, an extra embedding row of the model."""

ROOT = NodeId(-1)
"""The parent of nodes that directly follow the cached tokens."""
MIXTURE = TokenId(-1)
"""The input of a node whose embedding is a mixture."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """An input that is a weighted sum of embedding rows."""

    tokens: tuple[int, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class TokenGraph:
    """Nodes in an order in which parents come first; `len(graph)` counts them."""

    tokens: IntArray
    positions: IntArray
    parents: IntArray
    blocks: IntArray
    probes: BoolArray
    mixtures: Mapping[int, Mixture] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def is_chain(self) -> bool:
        """Whether each node sees exactly the nodes before it and itself."""
        n = len(self)
        return bool(
            n == 0
            or (
                np.array_equal(self.parents, np.arange(-1, n - 1))
                and len(np.unique(self.blocks)) == n
            )
        )

    @cached_property
    def is_tree(self) -> bool:
        """Whether each node sees its ancestors and itself, and no other node of the graph."""
        return self.is_chain or len(np.unique(self.blocks)) == len(self)

    @cached_property
    def is_linear(self) -> bool:
        """Whether no two nodes have the same position."""
        return len(np.unique(self.positions)) == len(self)

    @cached_property
    def sees(self) -> BoolArray:
        """`sees[i, j]`: node i attends to node j."""
        n = len(self)
        if self.is_chain:
            return np.tril(np.ones((n, n), dtype=np.bool_))
        seen = np.equal.outer(self.blocks, self.blocks)
        for i in range(n):
            if (parent := int(self.parents[i])) >= 0:
                seen[i] |= seen[parent]
        return seen

    @cached_property
    def depths(self) -> IntArray:
        """How many blocks lie between a node and the cached tokens, its own not counted."""
        return _ints(_depths(self.parents.tolist()))

    @cached_property
    def _children(self) -> dict[int, list[NodeId]]:
        found: dict[int, list[NodeId]] = {}
        for i, parent in enumerate(self.parents.tolist()):
            found.setdefault(parent, []).append(NodeId(i))
        return found

    def children(self, node: NodeId) -> list[NodeId]:
        """The nodes whose parent is `node` (`ROOT` for the topmost), in order."""
        if node == len(self.tokens) - 1:
            return []
        if self.is_chain:
            return [NodeId(node + 1)]
        return self._children.get(node, [])

    def path(self, node: NodeId) -> list[NodeId]:
        """From the topmost ancestor down to `node` itself."""
        path = []
        while node >= 0:
            path.append(node)
            node = NodeId(int(self.parents[node]))
        return path[::-1]

    def follow(self, node: NodeId, token: int) -> NodeId | None:
        """The child of `node` whose input is `token`, if there is one that may be kept."""
        if node == len(self.tokens) - 1:  # the common case: nothing was drafted
            return None
        for child in self.children(node):
            if self.tokens.item(child) == token and not self.probes.item(child):
                return child
        return None

    def grow(self, other: TokenGraph, at: NodeId | None = None) -> TokenGraph:
        """This graph with `other` appended below node `at` (by default the last node)."""
        if len(other) == 0:
            return self
        n = len(self) + len(other)
        plain = at is None and n < _MANY and not self.mixtures and not other.mixtures
        if plain and self.is_chain and other.is_chain:
            graph = TokenGraph(
                tokens=np.concatenate([self.tokens, other.tokens]),
                positions=np.concatenate([self.positions, other.positions]),
                parents=_NUMBERS[:n],
                blocks=_NUMBERS[1 : n + 1],
                probes=np.concatenate([self.probes, other.probes]),
            )
            graph.__dict__["is_chain"] = True
            return graph
        if at is None:
            at = NodeId(len(self) - 1)
        shift, above = len(self), int(self.blocks.max(initial=-1)) + 1
        return TokenGraph(
            tokens=np.concatenate([self.tokens, other.tokens]),
            positions=np.concatenate([self.positions, other.positions]),
            parents=np.concatenate(
                [self.parents, np.where(other.parents < 0, at, other.parents + shift)]
            ),
            blocks=np.concatenate([self.blocks, other.blocks + above]),
            probes=np.concatenate([self.probes, other.probes]),
            mixtures={
                **self.mixtures,
                **{node + shift: mixture for node, mixture in other.mixtures.items()},
            },
        )

    def part(self, nodes: Sequence[int]) -> TokenGraph:
        """Some of the nodes, in order, as a graph of their own. They may see no node outside it."""
        chosen = _ints(nodes)
        inside = np.zeros(len(self) + 1, dtype=np.bool_)
        inside[chosen] = True
        if len(chosen) and (chosen[0] < 0 or (np.diff(chosen) <= 0).any()):
            raise ValueError("the nodes of a part must be in rising order, each once")
        above = self.parents[chosen]
        apart = ~inside[above] & (above >= 0)
        if apart.any() or (not self.is_tree and self.sees[chosen][:, ~inside[:-1]].any()):
            raise ValueError("a part must contain all nodes that its nodes see")
        places = np.full(len(self) + 1, ROOT)  # the last one stands for "no parent"
        places[chosen] = np.arange(len(chosen))
        return TokenGraph(
            tokens=self.tokens[chosen],
            positions=self.positions[chosen],
            parents=places[above],
            blocks=np.unique(self.blocks[chosen], return_inverse=True)[1].reshape(-1),
            probes=self.probes[chosen],
            mixtures={int(places[n]): x for n, x in self.mixtures.items() if inside[n]},
        )

    def starts_with(self, other: TokenGraph) -> bool:
        """Whether this graph is `other` with nodes appended."""
        n = len(other)
        return (
            len(self) >= n
            and np.array_equal(self.tokens[:n], other.tokens)
            and np.array_equal(self.positions[:n], other.positions)
            and np.array_equal(self.parents[:n], other.parents)
        )


_MANY = 4096
_NUMBERS = np.arange(-1, _MANY)
_NUMBERS.flags.writeable = False
_NO = np.zeros(_MANY, dtype=np.bool_)
_NO.flags.writeable = False
_TOPMOST = np.full(_MANY, -1)
_TOPMOST.flags.writeable = False
_FIRST = np.zeros(_MANY, dtype=np.int64)
_FIRST.flags.writeable = False
_PURE: Mapping[int, Mixture] = {}
_LONE = {
    "parents": _NUMBERS[:1],
    "blocks": _NUMBERS[1:2],
    "probes": _NO[:1],
    "mixtures": _PURE,
    "is_chain": True,
}
"""The fields that all chains of one node share."""


def _ints(values: Sequence[int] | IntArray) -> IntArray:
    return np.asarray(values, dtype=np.int64)


def chain(
    tokens: Sequence[int] | IntArray,
    start: int = 0,
    *,
    positions: Sequence[int] | IntArray | None = None,
    probe: bool = False,
) -> TokenGraph:
    """Tokens one after the other, at `start`, `start + 1`, … or at the given positions.

    Positions out of order are allowed: a chain sees by order of nodes, not of positions.
    """
    n = len(tokens)
    if positions is not None:
        places = _ints(positions)
    elif start + n < _MANY:  # arrays that many chains have in common are shared
        places = _NUMBERS[start + 1 : start + n + 1]
    else:
        places = np.arange(start, start + n)
    graph = TokenGraph.__new__(TokenGraph)  # skips the checks of a frozen class: built at each step
    fields = graph.__dict__
    if n == 1 and not probe:
        fields.update(_LONE)
    else:
        small = n < _MANY
        fields["parents"] = _NUMBERS[:n] if small else np.arange(-1, n - 1)
        fields["blocks"] = _NUMBERS[1 : n + 1] if small else np.arange(n)
        fields["probes"] = _NO[:n] if small and not probe else np.full(n, probe)
        fields["mixtures"] = _PURE
        fields["is_chain"] = True
    fields["tokens"] = np.array(tokens, dtype=np.int64)
    fields["positions"] = places
    return graph


def tree(
    tokens: Sequence[int] | IntArray, parents: Sequence[int] | IntArray, start: int
) -> TokenGraph:
    """A token tree; `parents` index into `tokens`, -1 for the topmost, which are at `start`."""
    above = _ints(parents)
    n, listed = len(tokens), above.tolist()
    _check(n, listed)
    small, depths = n < _MANY, _ints(_depths(listed))
    graph = TokenGraph(
        tokens=_ints(tokens),
        positions=depths + start,
        parents=above,
        blocks=_NUMBERS[1 : n + 1] if small else np.arange(n),
        probes=_NO[:n] if small else np.zeros(n, dtype=np.bool_),
        mixtures=_PURE,
    )
    graph.__dict__.update(is_chain=listed == list(range(-1, n - 1)), is_tree=True, depths=depths)
    return graph


def drafted(given: TokenGraph, tokens: list[int], parents: list[int], start: int) -> TokenGraph:
    """`given.grow(tree(tokens, parents, start))` in one call, for most steps that draft."""
    shift, n = len(given.tokens), len(given.tokens) + len(tokens)
    if (
        shift == 1
        and parents == list(range(-1, len(tokens) - 1))
        and given.positions.item(0) == start - 1
        and not (given.mixtures or given.probes.item(0))
    ):
        return chain([given.tokens.item(0), *tokens], start - 1)
    if n >= _MANY or given.mixtures or not given.is_chain:
        return given.grow(tree(tokens, parents, start))
    _check(len(tokens), parents)
    above = given.parents.tolist() + [parent + shift for parent in parents]
    places = given.positions.tolist() + [depth + start for depth in _depths(parents)]
    graph = TokenGraph(
        tokens=_ints(given.tokens.tolist() + tokens),
        positions=_ints(places),
        parents=_ints(above),
        blocks=_NUMBERS[1 : n + 1],
        probes=_NO[:n] if not given.probes.any() else np.append(given.probes, _NO[: n - shift]),
        mixtures=_PURE,
    )
    graph.__dict__.update(is_chain=above == list(range(-1, n - 1)), is_tree=True)
    return graph


def _check(count: int, parents: list[int]) -> None:
    if len(parents) != count or any(not -1 <= parent < i for i, parent in enumerate(parents)):
        raise ValueError("a tree needs one parent per token, each before its child")


def _depths(parents: list[int]) -> list[int]:
    """The depth of each node below the topmost ones; parents come before their children."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def block(
    inputs: Sequence[int | Mixture],
    start: int = 0,
    *,
    positions: Sequence[int] | IntArray | None = None,
) -> TokenGraph:
    """Nodes that all see each other."""
    n = len(inputs)
    small = n < _MANY
    mixtures = {i: x for i, x in enumerate(inputs) if isinstance(x, Mixture)}
    tokens = [MIXTURE if isinstance(x, Mixture) else x for x in inputs] if mixtures else inputs
    graph = TokenGraph(
        tokens=np.array(tokens, dtype=np.int64),
        positions=np.arange(start, start + n) if positions is None else _ints(positions),
        parents=_TOPMOST[:n] if small else np.full(n, -1),
        blocks=_FIRST[:n] if small else np.zeros(n, dtype=np.int64),
        probes=_NO[:n] if small else np.zeros(n, dtype=np.bool_),
        mixtures=mixtures,
    )
    graph.__dict__.update(is_chain=n < 2, is_tree=n < 2)
    return graph


def union(*graphs: TokenGraph) -> TokenGraph:
    """Graphs side by side: none sees another."""
    joined = empty()
    for graph in graphs:
        joined = joined.grow(graph, at=ROOT)
    return joined


def alternatives(*graphs: TokenGraph) -> TokenGraph:
    """Alternative graphs over the same positions, of which at most one will be kept."""
    if any(not np.array_equal(g.positions, graphs[0].positions) for g in graphs):
        raise ValueError("alternatives must have the same positions")
    return union(*graphs)


def empty() -> TokenGraph:
    """The graph without nodes."""
    return chain([])


def nodes_for(graph: TokenGraph, positions: Sequence[int], offset: int) -> tuple[int, ...]:
    """The nodes that score these positions; where several do, the last of them."""
    at = {int(p): node for node, p in enumerate(graph.positions)}
    return tuple(sorted(at[p - offset] for p in positions if p - offset in at))
