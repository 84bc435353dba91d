"""Each operation gives a row the same bits whatever else is in the batch."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from outstride.core.graph import block, chain, tree
from outstride.core.sequence import BlockTable
from outstride.ops import arithmetic as ops
from outstride.ops.attention_plan import plan
from outstride.ops.contract import Span

Rows = Callable[[torch.Tensor], torch.Tensor]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def alone_and_in_a_batch(operation: Rows, rows: torch.Tensor) -> None:
    """The operation on every row by itself, on all, on a part, and in another order."""
    whole = operation(ops.pad(rows))[: len(rows)]
    for i in range(0, len(rows), 7):
        assert torch.equal(operation(ops.pad(rows[i : i + 1]))[0], whole[i])
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    assert torch.equal(operation(ops.pad(rows[order]))[: len(rows)], whole[order])
    assert torch.equal(operation(ops.pad(rows[3:20]))[:17], whole[3:20])


@pytest.mark.parametrize(("inner", "outer"), [(48, 97), (576, 1536), (1536, 576), (64, 9000)])
def test_linear(inner: int, outer: int) -> None:
    weight, bias, rows = noise(outer, inner), noise(outer, seed=1), noise(100, inner, seed=2)
    alone_and_in_a_batch(lambda x: ops.linear(x, weight, bias), rows)
    whole = ops.linear(ops.pad(rows), weight, bias)[:100]
    torch.testing.assert_close(whole, rows @ weight.T + bias, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("width", [16, 48, 100, 576, 4096])
def test_rms_norm(width: int) -> None:
    weight, rows = noise(width), noise(37, width, seed=1)
    alone_and_in_a_batch(lambda x: ops.rms_norm(x, weight, 1e-5), rows)
    right = rows / torch.sqrt(rows.square().mean(-1, keepdim=True) + 1e-5) * weight
    torch.testing.assert_close(ops.rms_norm(ops.pad(rows), weight, 1e-5)[:37], right)


def test_rms_norm_of_heads() -> None:
    weight = noise(24)
    alone_and_in_a_batch(lambda x: ops.rms_norm(x, weight, 1e-6), noise(37, 5, 24, seed=1))


@pytest.mark.parametrize("width", [1, 7, 100, 1536])
def test_silu_mul(width: int) -> None:
    rows = 5 * noise(37, 2 * width)

    def operation(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return ops.silu_mul(gate, up)

    alone_and_in_a_batch(operation, rows)
    gate, up = rows.chunk(2, dim=-1)
    torch.testing.assert_close(operation(rows), torch.nn.functional.silu(gate) * up)


def test_silu_mul_of_extreme_values() -> None:
    gate = torch.tensor([[-1e4, -200.0, -100.0, 0.0, 100.0, 1e4]])
    assert torch.isfinite(ops.silu_mul(gate, torch.ones_like(gate))).all()


def test_rope_depends_on_the_position_alone() -> None:
    inverse = torch.tensor([1.0, 0.3, 0.01, 0.001])
    rows, positions = noise(37, 3, 8), torch.arange(37) * 211
    cos, sin = ops.rope_tables(positions, inverse, 1.25)
    whole = ops.rope(rows, cos, sin)
    for i in range(37):
        alone = ops.rope(rows[i : i + 1], *ops.rope_tables(positions[i : i + 1], inverse, 1.25))
        assert torch.equal(alone[0], whole[i])
    angle = positions[5] * inverse[1]
    low, high = rows[5, 0, 1], rows[5, 0, 5]
    torch.testing.assert_close(whole[5, 0, 1], 1.25 * (low * angle.cos() - high * angle.sin()))
    torch.testing.assert_close(whole[5, 0, 5], 1.25 * (high * angle.cos() + low * angle.sin()))


# --- attention ------------------------------------------------------------------------------------

HEADS, GROUP, SIZE, PAGE = 2, 3, 16, 16


def pools(slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    values = noise(HEADS, slots, SIZE + ops.SPARE, seed=4)
    values[..., SIZE:] = 1.0
    return noise(HEADS, slots, SIZE, seed=3), values


def attend(
    spans: list[Span], queries: torch.Tensor, slots: int, window: int | None = None
) -> torch.Tensor:
    keys, values = pools(slots)
    made = plan(spans, group=GROUP, kv_heads=HEADS, window=window, page_size=PAGE)
    return ops.attention(queries, keys, values, made)


def naive(span: Span, queries: torch.Tensor, slots: int, window: int | None) -> torch.Tensor:
    """Attention in float64 with one mask per node."""
    keys, values = (pool.double() for pool in pools(slots))
    table, graph = span.table, span.graph
    kept = [
        (table.positions[i], table.pages[i // PAGE] * PAGE + i % PAGE) for i in range(len(table))
    ]
    result = torch.zeros(HEADS, len(graph) * GROUP, SIZE, dtype=torch.float64)
    for node in range(len(graph)):
        seen = kept + [
            (int(graph.positions[j]), int(span.slots[j])) for j in np.flatnonzero(graph.sees[node])
        ]
        if window is not None:
            seen = [s for s in seen if s[0] > graph.positions[node] - window]
        chosen = torch.tensor([slot for _, slot in seen])
        for head in range(HEADS):
            rows = slice((span.row + node) * GROUP, (span.row + node + 1) * GROUP)
            scores = queries[head, rows].double() @ keys[head, chosen].T
            result[head, node * GROUP : (node + 1) * GROUP] = (
                scores.softmax(-1) @ values[head, chosen, :SIZE]
            )
    return result


@pytest.mark.parametrize("window", [None, 1, 64, 100])
@pytest.mark.parametrize("context", [0, 63, 200])
def test_attention_against_the_definition(context: int, window: int | None) -> None:
    table = BlockTable(
        pages=[3, 1, 4, 15, 9, 2, 6, 5, 35, 8, 7, 30, 13], positions=list(range(context))
    )
    graphs = [
        chain([0] * 70, context),
        tree([0] * 9, [-1, 0, 0, 1, 1, 2, -1, 6, 7], context),
        block([0] * 20, context),
    ]
    slots = np.arange(640, 710)
    for graph in graphs:
        queries = noise(HEADS, 80 * GROUP, SIZE, seed=7)
        span = Span(graph, slots[: len(graph)], table, 0, 2)
        got = attend([span], queries, 800, window)
        rows = slice(2 * GROUP, (2 + len(graph)) * GROUP)
        right = naive(span, queries, 800, window)
        torch.testing.assert_close(got[:, rows].double(), right, rtol=1e-4, atol=1e-5)
        assert (got[:, : 2 * GROUP] == 0).all()


def test_attention_alone_and_among_others() -> None:
    tables = [BlockTable(pages=[i], positions=list(range(i))) for i in range(16)]
    spans, row = [], 0
    for i, table in enumerate(tables):
        graph = chain([0] * (i % 3 + 1), i)
        spans.append(Span(graph, np.arange(400 + 4 * i, 400 + 4 * i + len(graph)), table, 0, row))
        row += len(graph)
    queries = noise(HEADS, row * GROUP, SIZE)
    together = attend(spans, queries, 500)
    for span in spans:
        alone = attend([span], queries, 500)
        rows = slice(span.row * GROUP, (span.row + len(span.graph)) * GROUP)
        assert torch.equal(alone[:, rows], together[:, rows])


def test_slots_do_not_matter() -> None:
    """The same KV in other slots, listed in another order, gives the same bits."""
    keys, values = pools(600)
    order = np.random.default_rng(0).permutation(100)
    queries = noise(HEADS, 16 * GROUP, SIZE)
    graph = chain([0] * 3, 100)
    straight = Span(graph, np.arange(100, 103), BlockTable(list(range(10)), list(range(100))), 0, 0)
    shuffled = Span(
        graph,
        np.asarray([500, 480, 490]),
        BlockTable(list(range(20, 30)), [int(p) for p in order]),
        0,
        0,
    )
    moved_keys, moved_values = keys.clone(), values.clone()
    targets = torch.tensor([*range(320, 420), 500, 480, 490])
    sources = torch.tensor([*[int(p) for p in order], 100, 101, 102])
    moved_keys[:, targets], moved_values[:, targets] = keys[:, sources], values[:, sources]
    options = {"group": GROUP, "kv_heads": HEADS, "page_size": PAGE}
    one = ops.attention(queries, keys, values, plan([straight], window=None, **options))
    two = ops.attention(queries, moved_keys, moved_values, plan([shuffled], window=None, **options))
    assert torch.equal(one, two)


def test_scores_far_apart_do_not_overflow() -> None:
    keys, values = pools(400)
    queries = 1e3 * noise(HEADS, 16 * GROUP, SIZE)
    table = BlockTable(pages=list(range(12)), positions=list(range(180)))
    span = Span(chain([0] * 4, 180), np.arange(200, 204), table, 0, 0)
    made = plan([span], group=GROUP, kv_heads=HEADS, window=None, page_size=PAGE)
    assert torch.isfinite(ops.attention(queries, 1e3 * keys, values, made)).all()
    assert math.isfinite(float(values.sum()))
