"""The native recurrence has the bits of the one in torch, for chains, trees and replays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outstride.core.graph import TokenGraph, chain, tree
from outstride.core.recurrent import StatePass
from outstride.core.sequence import BlockTable
from outstride.ops.contract import Span
from outstride.ops.cpu import native
from outstride.ops.recurrent import RecurrentKind, RecurrentShape
from outstride.ops.recurrent_plan import RecurrentSteps, path_levels, plan
from outstride.ops.recurrent_states import NodeInputs, TorchRecurrence

pytestmark = pytest.mark.skipif(
    native.library_path() is None, reason="no native kernels were built"
)
SLOTS = 6


def shape_of(kind: RecurrentKind, key_dim: int, value_dim: int) -> RecurrentShape:
    return RecurrentShape(
        kind,
        (True,),
        kernel=4,
        channels=8,
        heads=6,
        key_heads=2,
        key_dim=key_dim,
        value_dim=value_dim,
    )


def inputs(shape: RecurrentShape, nodes: int, source: torch.Generator) -> NodeInputs:
    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(nodes, *sizes, generator=source)

    delta = shape.kind is RecurrentKind.DELTA
    return NodeInputs(
        random(0),
        random(shape.key_heads, shape.key_dim),
        random(shape.heads, shape.value_dim),
        random(shape.heads).sigmoid(),
        random(shape.heads).sigmoid() if delta else random(0),
    )


def spans(*graphs: tuple[TokenGraph, int, StatePass | None]) -> list[Span]:
    found: list[Span] = []
    for graph, first, state in graphs:
        row = found[-1].rows.stop if found else 0
        slots = np.arange(len(graph))
        found.append(Span(graph, slots, BlockTable(), first, row, state=state))
    return found


BRANCHES = tree([5, 6, 7, 8, 9, 10, 11, 12], [-1, -1, 0, 0, 1, 2, 2, 5], start=3)
PASSES: dict[str, list[tuple[TokenGraph, int, StatePass | None]]] = {
    "prompt": [(chain(list(range(20))), 0, StatePass(2, 20, True, ((8, 4), (16, 5))))],
    "tree": [(chain([1, 2, 3]).grow(BRANCHES), 0, StatePass(1, 3, False, ()))],
    "later round": [(chain([1, 2, 3]).grow(BRANCHES), 6, StatePass(0, 3, False, ()))],
    "batch": [
        (chain([1]).grow(BRANCHES), 0, StatePass(1, 1, False, ())),
        (chain(list(range(9))), 0, StatePass(3, 9, False, ((4, 5),))),
        (BRANCHES, 0, None),
    ],
}


@pytest.mark.parametrize("sizes", [(16, 32), (13, 7), (1, 5), (128, 128)])
@pytest.mark.parametrize("kind", [RecurrentKind.DELTA, RecurrentKind.SSM])
@pytest.mark.parametrize("name", PASSES)
def test_same_bits(name: str, kind: RecurrentKind, sizes: tuple[int, int]) -> None:
    from outstride.ops.cpu.recurrence import NativeRecurrence

    shape, source = shape_of(kind, *sizes), torch.Generator().manual_seed(3)
    made = plan(spans(*PASSES[name]), shape.kernel)
    nodes = inputs(shape, made.rows + sum(made.earlier), source)
    queries = torch.randn(made.rows, shape.key_heads, shape.key_dim, generator=source)
    before = [None if new else slot for slot, new in zip(made.slots, made.fresh, strict=True)]
    states = torch.randn(SLOTS, shape.heads, *sizes, generator=source)
    results = []
    for recurrence in (TorchRecurrence(shape), NativeRecurrence(shape)):
        own = states.clone()
        found = recurrence(own, before, made.levels, nodes, queries, made.rows)
        results.append((found, own))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][0].abs().max() > 0


def test_a_replay_leaves_the_states_of_the_pass() -> None:
    """Paths of different lengths side by side, with snapshots on the way."""
    from outstride.ops.cpu.recurrence import NativeRecurrence

    shape, source = shape_of(RecurrentKind.DELTA, 16, 16), torch.Generator().manual_seed(4)
    levels = path_levels([3, 1, 5], [((3, 0),), ((1, 1),), ((2, 4), (5, 2))])
    nodes, states = inputs(shape, 9, source), torch.randn(SLOTS, 6, 16, 16, generator=source)
    results = []
    for recurrence in (TorchRecurrence(shape), NativeRecurrence(shape)):
        own = states.clone()
        recurrence(own, [0, 1, 2], levels, nodes, None, 0)
        results.append(own)
    assert torch.equal(*results)
    assert not torch.equal(results[0], states)


def test_a_chain_needs_one_buffer() -> None:
    made = plan(spans((chain(list(range(30))), 0, None)), 4)
    assert RecurrentSteps.of(made.levels, 1).buffers == 1
