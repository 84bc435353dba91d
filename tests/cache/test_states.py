"""State slots: who holds them, when snapshots are taken, and who gives way."""

from __future__ import annotations

import numpy as np
import pytest

from outstride.cache.pool import PagePool
from outstride.core.recurrent import StateAdvance, StateCopy, StatePass, StateSpec
from outstride.core.sequence import BlockTable
from outstride.errors import IntegrityError

PAGE = 4


def pool(slots: int = 4, pages: int = 32) -> PagePool:
    """A pool with a snapshot every second page."""
    return PagePool(pages, PAGE, StateSpec(slots, 2 * PAGE))


def begin(pages: PagePool, table: BlockTable, given: int, first: int, **more: int) -> StatePass:
    assert pages.states is not None
    return pages.states.begin(table, given, first, **more)


def read(pages: PagePool, table: BlockTable, tokens: list[int], drafted: int = 0) -> list[object]:
    """One step that reads all tokens, and keeps `drafted` drafted ones; the state updates."""
    given = len(tokens) - len(table) - drafted
    moves = pages.reserve(table, given + drafted)
    assert moves is not None
    found: list[object] = [*moves.states, begin(pages, table, given, 0)]
    positions = np.arange(len(table), len(tokens))
    found += pages.commit(table, positions, range(len(positions))).states
    pages.publish(table, tokens)
    return found


def test_a_pass_advances_through_given_nodes_and_takes_snapshots() -> None:
    pages, table, tokens = pool(), BlockTable(), list(range(20))
    (use,) = read(pages, table, tokens)
    assert use.slot == table.state.slot  # type: ignore[union-attr,attr-defined]
    assert use.fresh  # type: ignore[attr-defined]
    assert use.given == 20  # type: ignore[attr-defined]
    assert [count for count, _ in use.snapshots] == [8, 16]  # type: ignore[attr-defined]
    pages.check_integrity([table])


def test_commit_replays_what_was_drafted() -> None:
    pages, table = pool(), BlockTable()
    read(pages, table, list(range(6)))
    _, update = read(pages, table, list(range(10)), drafted=3)
    assert isinstance(update, StateAdvance)
    assert update.nodes == (1, 2, 3)
    assert [count for count, _ in update.snapshots] == [1]  # position 8
    pages.check_integrity([table])


def test_a_verdict_that_drops_given_nodes_is_an_error() -> None:
    pages, table = pool(), BlockTable()
    assert pages.reserve(table, 3) is not None
    begin(pages, table, 3, 0)
    with pytest.raises(IntegrityError, match="given nodes"):
        pages.commit(table, np.arange(3), [0, 1])


def test_a_prefix_ends_at_its_last_snapshot() -> None:
    pages, table, tokens = pool(), BlockTable(), list(range(15))
    read(pages, table, tokens)
    found = pages.open([*tokens, 99])
    assert len(found) == 8  # pages of twelve tokens are shared; the last snapshot is at eight
    moves = pages.reserve(found, 4)
    assert moves is not None
    (copy,) = moves.states
    assert isinstance(copy, StateCopy)
    assert copy.target == found.state.slot  # type: ignore[union-attr]
    pages.check_integrity([table, found])
    for one in (table, found):
        pages.close(one)
    pages.check_integrity([])


def test_snapshots_give_way_to_sequences() -> None:
    pages, table = pool(slots=3), BlockTable()
    read(pages, table, list(range(17)))  # its own slot and two snapshots
    others = [BlockTable(), BlockTable()]
    assert all(pages.reserve(other, 2) is not None for other in others)
    assert pages.reserve(BlockTable(), 2) is None  # every slot belongs to a sequence
    assert len(pages.open([*range(17), 5])) == 0
    pages.check_integrity([table, *others])


def test_a_fork_starts_at_the_snapshot_that_was_taken_for_it() -> None:
    pages, table = pool(), BlockTable()
    assert pages.reserve(table, 11) is not None
    begin(pages, table, 11, 0, fork=10)
    pages.commit(table, np.arange(11), range(11))
    pages.publish(table, list(range(11)))
    child, elsewhere = pages.fork(table, 10), pages.fork(table, 9)
    assert len(child) == 10
    assert len(elsewhere) == 8  # no snapshot there: back to the last one
    pages.check_integrity([table, child, elsewhere])
    moves = pages.reserve(child, 1)
    assert moves is not None
    assert isinstance(moves.states[0], StateCopy)


def test_an_evicted_page_takes_its_snapshot_along() -> None:
    pages, table = pool(pages=6), BlockTable()
    read(pages, table, list(range(17)))
    pages.close(table)
    other = BlockTable()
    assert pages.reserve(other, 24) is not None
    pages.check_integrity([other])
