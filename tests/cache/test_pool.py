"""Pages are shared until written, returned when unused, and consistent at any time."""

from __future__ import annotations

import random

import numpy as np
import pytest

from outstride.cache.pool import Moves, PagePool
from outstride.core.contracts import AttentionPattern
from outstride.core.prefix_key import PrefixKey
from outstride.core.sequence import BlockTable
from outstride.errors import IntegrityError

BLOCKS = PrefixKey(pattern=AttentionPattern(4))


class Store:
    """A model's KV cache: one value per slot."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.slots = np.full(pool.capacity, -1)

    def apply(self, moves: Moves | None) -> None:
        assert moves is not None
        if moves:
            sources, targets = moves.arrays()
            self.slots[targets] = self.slots[sources]

    def extend(self, table: BlockTable, values: list[int], keep: list[int] | None = None) -> None:
        """One pass: a node per value at the following positions, of which some are kept."""
        keep = list(range(len(values))) if keep is None else keep
        self.apply(self.pool.reserve(table, len(values)))
        self.slots[self.pool.slots(table, len(values))] = values
        positions = np.zeros(len(values), dtype=np.int64)
        for place, node in enumerate(keep):
            positions[node] = len(table) + place
        self.apply(self.pool.commit(table, positions, keep))

    def read(self, table: BlockTable) -> list[int]:
        size = self.pool.page_size
        return [
            int(self.slots[table.pages[i // size] * size + i % size]) for i in range(len(table))
        ]


def test_commit_keeps_a_scattered_path() -> None:
    pool = PagePool(8, 4)
    store, table = Store(pool), pool.open([])
    store.extend(table, [10, 11, 12])
    store.extend(table, [20, 21, 22, 23, 24], keep=[0, 2, 4])
    assert store.read(table) == [10, 11, 12, 20, 22, 24]
    assert table.positions == list(range(6))
    pool.check_integrity([table])


def test_survivors_are_compacted() -> None:
    """Across pages, with some nodes in the right slot already; commit then keeps them there."""
    pool = PagePool(8, 4)
    store, table = Store(pool), pool.open([])
    store.extend(table, [10, 11, 12])
    store.apply(pool.reserve(table, 9))
    store.slots[pool.slots(table, 9)] = range(20, 29)
    moves = pool.close_up(table, (0, 1, 4, 6, 8))
    assert len(moves.sources) == 3
    store.apply(moves)
    assert store.slots[pool.slots(table, 5)].tolist() == [20, 21, 24, 26, 28]
    assert not pool.close_up(table, (0, 1, 2))
    store.apply(pool.commit(table, np.asarray([3, 4, 5, 4, 5]), [0, 3, 4]))
    assert store.read(table) == [10, 11, 12, 20, 26, 28]
    pool.check_integrity([table])


def test_forks_copy_only_what_they_write() -> None:
    pool = PagePool(8, 4)
    store, table = Store(pool), pool.open([])
    store.extend(table, [1, 2, 3, 4, 5, 6])
    child = pool.fork(table, 5)
    assert child.pages == table.pages
    store.extend(child, [70, 80])
    store.extend(table, [7, 8])
    assert store.read(table) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert store.read(child) == [1, 2, 3, 4, 5, 70, 80]
    assert child.pages[0] == table.pages[0]
    pool.check_integrity([table, child])


def test_prefixes_are_found_and_evicted_oldest_first() -> None:
    pool = PagePool(4, 2)
    store = Store(pool)
    for first in (10, 20):
        tokens = [first, first + 1, first + 2]
        table = pool.open(tokens)
        store.extend(table, tokens)
        pool.publish(table, tokens)
        pool.close(table)
        pool.check_integrity([])
    again = pool.open([10, 11, 99])
    assert store.read(again) == [10, 11]
    pool.close(again)
    big = pool.open([1])
    store.extend(big, [0] * 6)
    pool.check_integrity([big])
    assert len(pool.open([20, 21, 99])) == 0, "the older prefix went first"
    kept = pool.open([10, 11, 99])
    assert len(kept) == 2
    assert pool.reserve(kept, 3) is None, "a page in use is never evicted"
    pool.check_integrity([big, kept])


def test_equal_pages_become_one() -> None:
    pool = PagePool(8, 2)
    store = Store(pool)
    tables = [pool.open([5, 6, 7]) for _ in range(2)]
    for table in tables:
        store.extend(table, [5, 6, 7])
    for table in tables:
        pool.publish(table, [5, 6, 7])
    assert tables[0].pages[0] == tables[1].pages[0]
    pool.check_integrity(tables)


def test_stale_kv_stays_until_its_position_is_computed_again() -> None:
    pool = PagePool(8, 4)
    store, table = Store(pool), pool.open([])
    store.apply(pool.reserve(table, 4))
    store.slots[pool.slots(table, 4)] = [1, 2, 3, 4]
    store.apply(pool.commit(table, np.arange(4), [0], [1, 2, 3]))
    assert (table.valid, table.stale) == (1, 3)
    store.apply(pool.reserve(table, 2))
    store.slots[pool.slots(table, 2)] = [20, 30]
    store.apply(pool.commit(table, np.asarray([1, 2]), [0], [1]))
    assert table.positions == [0, 1, 3, 2]
    assert store.read(table) == [1, 20, 4, 30]
    assert (table.valid, table.stale) == (2, 2)
    pool.publish(table, [0, 1, 2, 3])
    assert table.shared == 0
    pool.check_integrity([table])


def test_block_models_reuse_whole_blocks_only() -> None:
    pool = PagePool(16, 2)
    store, tokens = Store(pool), list(range(20, 30))
    table = pool.open(tokens, BLOCKS)
    store.extend(table, tokens)
    pool.publish(table, tokens, BLOCKS)
    assert len(pool.open(tokens, BLOCKS)) == 8
    assert len(pool.open(tokens[:8], BLOCKS)) == 4
    assert (
        len(pool.open(tokens))
        == len(pool.open(tokens, PrefixKey(pattern=AttentionPattern(2))))
        == 0
    ), "read in another way"


@pytest.mark.parametrize("seed", range(8))
def test_random_operations(seed: int) -> None:
    """Any order of computing, forking, publishing and closing leaves every table correct."""
    rng = random.Random(seed)
    pool = PagePool(24, 3)
    store = Store(pool)
    tables: list[tuple[BlockTable, list[int]]] = []
    for _ in range(400):
        action = rng.random()
        if action < 0.25 and len(tables) < 6:
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 12))]
            table = pool.open(tokens)
            known = tokens[: len(table)]
            assert store.read(table) == prefix_values(known)
            tables.append((table, known))
        elif action < 0.4 and tables:
            table, known = tables.pop(rng.randrange(len(tables)))
            pool.close(table)
        elif action < 0.5 and tables and len(tables) < 6:
            table, known = rng.choice(tables)
            length = rng.randrange(len(known) + 1)
            tables.append((pool.fork(table, length), known[:length]))
        elif tables:
            table, known = rng.choice(tables)
            count = rng.randrange(1, 6)
            moves = pool.reserve(table, count)
            if moves is None:
                continue
            store.apply(moves)
            keep = sorted(rng.sample(range(count), rng.randrange(count + 1)))
            fresh = [rng.randrange(2) for _ in keep]
            values = [-9] * count
            for node, value in zip(
                keep, prefix_values([*known, *fresh])[len(known) :], strict=True
            ):
                values[node] = value
            store.slots[pool.slots(table, count)] = values
            positions = np.zeros(count, dtype=np.int64)
            positions[keep] = np.arange(len(known), len(known) + len(keep))
            store.apply(pool.commit(table, positions, keep))
            known += fresh
            pool.publish(table, known)
        pool.check_integrity(table for table, _ in tables)
        for table, known in tables:
            assert store.read(table) == prefix_values(known)


def prefix_values(tokens: list[int]) -> list[int]:
    """KV depends on all tokens up to its own, as in a model."""
    values, state = [], 7
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
        values.append(state)
    return values


def test_integrity_errors_are_found() -> None:
    pool = PagePool(4, 2)
    table = pool.open([])
    pool.reserve(table, 3)
    pool.commit(table, np.arange(3), [0, 1, 2])
    pool.check_integrity([table])
    for spoil in (
        lambda: table.pages.append(table.pages[0]),
        lambda: table.pages.pop(),
        lambda: table.positions.append(0),
        lambda: pool._free.append(table.pages[0]),
    ):
        before = (list(table.pages), list(table.positions), list(pool._free))
        spoil()
        with pytest.raises(IntegrityError):
            pool.check_integrity([table])
        table.pages, table.positions, pool._free = before
    with pytest.raises(IntegrityError):
        pool.check_integrity([])
