"""The order in which recurrent layers take the nodes of a pass, worked out once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from outstride.ops.contract import Span


@dataclass(frozen=True, slots=True)
class NodeLevel:
    """Nodes of equal depth, which are computed together."""

    nodes: torch.Tensor
    parents: torch.Tensor | None
    """Their parents' places in the level above; the places of states in the first level. None: the
    same places."""
    kept: tuple[tuple[int, int], ...] = ()
    """(place, slot): states that are copied to a slot."""


@dataclass(frozen=True, slots=True)
class RecurrentPlan:
    """The nodes of a pass in the order in which recurrent layers take them.

    Nodes are numbered: first the rows that the pass computes, then the nodes of earlier rounds whose
    inputs the model has kept. Inputs of convolutions: the inputs of all nodes, then the last ones
    before each span.
    """

    rows: int
    slots: tuple[int, ...]
    """By span: its state slot; -1: the state is zero and is not kept."""
    fresh: tuple[bool, ...]
    """By span: whether the state before it is zero."""
    earlier: tuple[int, ...]
    """By span: how many nodes of earlier rounds it has."""
    taps: torch.Tensor
    """[rows, kernel]: the inputs that a row's convolution reads, the oldest first."""
    levels: tuple[NodeLevel, ...]
    windows: tuple[tuple[tuple[int, ...], int], ...]
    """(inputs, slot): the last inputs before a copied state."""
    drafted: tuple[tuple[int, int, int, int], ...]
    """By span with a slot: rows (from, to) of drafted nodes, the slot, how many nodes are given."""


def plan(spans: Sequence[Span], kernel: int) -> RecurrentPlan:
    """Works out the order of a pass; raises ValueError for graphs that are no trees of tokens."""
    return _Planner(spans, kernel).plan()


class _Planner:
    """Builds a plan span by span."""

    def __init__(self, spans: Sequence[Span], kernel: int) -> None:
        self._spans, self._back = spans, kernel - 1
        self._rows = spans[-1].rows.stop
        self._earlier = [_num_earlier(span) for span in spans]
        self._levels: list[tuple[list[int], list[int], list[tuple[int, int]]]] = []
        self._taps = np.zeros((self._rows, kernel), dtype=np.int64)
        self._windows: list[tuple[tuple[int, ...], int]] = []
        self._drafted: list[tuple[int, int, int, int]] = []

    def plan(self) -> RecurrentPlan:
        stored = self._rows
        for number, span in enumerate(self._spans):
            self._add(number, span, stored)
            stored += self._earlier[number]
        return RecurrentPlan(
            rows=self._rows,
            slots=tuple(-1 if s.state is None else s.state.slot for s in self._spans),
            fresh=tuple(s.state is None or s.state.fresh for s in self._spans),
            earlier=tuple(self._earlier),
            taps=torch.from_numpy(self._taps),
            levels=tuple(_level(*level) for level in self._levels),
            windows=tuple(self._windows),
            drafted=tuple(self._drafted),
        )

    def _add(self, number: int, span: Span, stored: int) -> None:
        """stored: the number of the span's first node of an earlier round."""
        graph, state, first = span.graph, span.state, span.first
        if not graph.is_tree:
            raise ValueError(
                "a model with a recurrent state runs trees of tokens, not masked blocks; use a "
                "method for autoregressive models"
            )
        given = 0 if state is None else state.given
        begin = given if first else 0
        kept: dict[int, list[int]] = {}
        if state is not None and not first:
            for count, slot in (*state.snapshots, *(((given, state.slot),) if given else ())):
                kept.setdefault(count - 1, []).append(slot)
            if given and not np.array_equal(graph.parents[:given], np.arange(-1, given - 1)):
                raise ValueError("the given nodes of a recurrent model must follow each other")
        before = self._rows + sum(self._earlier) + number * self._back
        history: dict[int, list[int]] = {}
        places: dict[int, tuple[int, int]] = {}
        start = list(range(before, before + self._back))
        for node in range(begin, len(graph)):
            parent = int(graph.parents[node])
            if parent < begin and parent != begin - 1:
                raise ValueError("a later round of a recurrent model must follow its given nodes")
            at = stored + node - begin if node < first else span.row + node - first
            above = history[parent] if parent >= begin else start
            history[node] = [*above[1:], at]
            if node >= first:
                self._taps[span.row + node - first] = [*above, at]
            level, source = 0, number
            if parent >= begin:
                level, source = places[parent][0] + 1, places[parent][1]
            if level == len(self._levels):
                self._levels.append(([], [], []))
            nodes, parents, copies = self._levels[level]
            places[node] = (level, len(nodes))
            nodes.append(at)
            parents.append(source)
            for slot in kept.get(node, ()):
                copies.append((places[node][1], slot))
                self._windows.append((tuple(history[node]), slot))
        if state is not None:
            low = span.row + max(given - first, 0)
            self._drafted.append((low, span.rows.stop, state.slot, given))


def _num_earlier(span: Span) -> int:
    """How many drafted nodes earlier rounds of the step have computed."""
    if not span.first:
        return 0
    if span.state is None:
        raise ValueError("a later round of a recurrent model needs its state")
    return span.first - span.state.given


def _level(nodes: list[int], parents: list[int], kept: list[tuple[int, int]]) -> NodeLevel:
    same = parents == list(range(len(parents)))
    return NodeLevel(torch.tensor(nodes), None if same else torch.tensor(parents), tuple(kept))


def path_levels(
    lengths: Sequence[int], snapshots: Sequence[Sequence[tuple[int, int]]]
) -> list[NodeLevel]:
    """Levels of paths side by side: path i has `lengths[i]` nodes, numbered one path after the other.

    snapshots: by path, (nodes, slot): where the state after that many nodes is copied.
    """
    starts = np.cumsum([0, *lengths[:-1]])
    levels, above = [], list(range(len(lengths)))
    for depth in range(max(lengths, default=0)):
        paths = [i for i, length in enumerate(lengths) if length > depth]
        kept = [
            (place, slot)
            for place, path in enumerate(paths)
            for count, slot in snapshots[path]
            if count == depth + 1
        ]
        levels.append(
            _level([int(starts[i]) + depth for i in paths], [above.index(i) for i in paths], kept)
        )
        above = paths
    return levels


@dataclass(frozen=True, slots=True)
class RecurrentSteps:
    """Levels as steps of one node each, with the buffers that native code keeps their states in.

    The first buffers hold the states before each span. A node takes over its parent's buffer if no
    later step needs it.
    """

    nodes: npt.NDArray[np.int32]
    sources: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int32]
    buffers: int
    copies: tuple[tuple[int, int], ...]
    """(step, slot), rising: states that are copied to a slot."""

    @classmethod
    def of(cls, levels: Sequence[NodeLevel], spans: int) -> RecurrentSteps:
        above = list(range(spans))  # buffers of the level above
        nodes: list[int] = []
        sources: list[int] = []
        targets: list[int] = []
        copies: list[tuple[int, int]] = []
        buffers, free = spans, list[int]()
        for level in levels:
            count = len(level.nodes)
            parents = list(range(count)) if level.parents is None else level.parents.tolist()
            last = {parent: place for place, parent in enumerate(parents)}
            free += [buffer for place, buffer in enumerate(above) if place not in last]
            own = []
            for place, parent in enumerate(parents):
                target = above[parent]
                if last[parent] != place:
                    if not free:
                        free.append(buffers)
                        buffers += 1
                    target = free.pop()
                own.append(target)
                sources.append(above[parent])
            first = len(nodes)
            nodes += level.nodes.tolist()
            targets += own
            copies += sorted((first + place, slot) for place, slot in level.kept)
            above = own
        return cls(
            np.asarray(nodes, dtype=np.int32),
            np.asarray(sources, dtype=np.int32),
            np.asarray(targets, dtype=np.int32),
            buffers,
            tuple(copies),
        )
