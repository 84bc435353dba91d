"""Step tokens: as long as a table keeps its version, it has only grown at its end."""

from __future__ import annotations

import numpy as np
import pytest

from outstride.cache.pool import PagePool
from outstride.core.sequence import BlockTable

PAGE = 4


def slots(table: BlockTable) -> list[tuple[int, int]]:
    """Position and slot of all KV of a table."""
    return [
        (position, table.pages[i // PAGE] * PAGE + i % PAGE)
        for i, position in enumerate(table.positions)
    ]


def step(source: np.random.Generator, pool: PagePool, table: BlockTable, text: list[int]) -> None:
    """A pass over some nodes, of which some are kept, perhaps out of order or although stale."""
    nodes = int(source.integers(1, 7))
    if pool.reserve(table, nodes) is None:
        return
    start = table.valid
    positions = np.arange(start, start + nodes)
    if source.random() < 0.1:
        positions = source.permutation(positions)
    keep = list(range(int(source.integers(0, nodes + 1))))
    if source.random() < 0.2:
        keep = sorted(source.permutation(nodes)[: len(keep)].tolist())
    reuse = [n for n in range(nodes) if n not in keep] if source.random() < 0.1 else []
    pool.commit(table, positions, keep, reuse)
    if source.random() < 0.3:
        pool.publish(table, text)


@pytest.mark.parametrize("seed", range(20))
def test_a_table_that_keeps_its_version_has_only_grown(seed: int) -> None:
    source, pool = np.random.default_rng(seed), PagePool(64, PAGE)
    text = [0] * 400  # the same for all: pages have twins
    tables = [pool.open(text[:30]) for _ in range(3)]
    grown = 0
    for _ in range(250):
        i = int(source.integers(3))
        table, token, before = tables[i], tables[i].step_token, slots(tables[i])
        order, action = (table.ordered, table.stale), source.random()
        if len(table) > 80 or action < 0.03:
            pool.close(table)
        elif action < 0.08:
            pool.close(tables[(i + 1) % 3])
            tables[(i + 1) % 3] = pool.fork(table, table.valid)
        else:
            step(source, pool, table, text)
        if table.step_token.version == token.version:
            assert slots(table)[: token.num_cached] == before
            assert (table.ordered, table.stale) == order
            assert table.step_token == token.on(len(table) - len(before))
            grown += len(table) > len(before) and table.ordered and not table.stale
    assert grown > 5
    versions = {table.version for table in tables}
    assert len(versions) == 3
