"""`PagePool`: the pages of one model's KV cache, and which block tables hold them.

A page has `page_size` slots. Each sequence has a block table that lists its pages; full pages of
settled tokens are also in the prefix tree. A page is written only while a single table holds it, so
a fork or a prefix hit copies nothing until one of the holders writes. The pool moves no data: it
returns the moves that the model must make.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from outstride.cache.prefix import PrefixTree
from outstride.cache.states import StateSlots
from outstride.core.graph import IntArray
from outstride.core.prefix_key import ANY, PrefixKey
from outstride.core.recurrent import SequenceState, StateSpec, StateUpdate
from outstride.core.sequence import BlockTable
from outstride.errors import IntegrityError


@dataclass(slots=True)
class Moves:
    """Slots whose KV is to be copied: all sources are read before any target is written.

    states: the updates of recurrent states, in order.
    """

    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    states: list[StateUpdate] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.sources or self.states)

    def add(self, other: Moves) -> None:
        self.sources += other.sources
        self.targets += other.targets
        self.states += other.states

    def arrays(self) -> tuple[IntArray, IntArray]:
        return np.asarray(self.sources, dtype=np.int64), np.asarray(self.targets, dtype=np.int64)


STAY = Moves()
"""Nothing to copy. Shared: do not add to it."""


class PagePool:
    """The pages of one model, and its state slots if it has recurrent layers."""

    def __init__(self, pages: int, page_size: int, states: StateSpec | None = None) -> None:
        self.pages = pages
        self.page_size = page_size
        self._refs = [0] * pages
        self._free = list(range(pages - 1, -1, -1))
        self._tree = PrefixTree(page_size)
        self.states = None if states is None else StateSlots(states, page_size)
        self._idle = 0  # pages that only the tree holds
        self.hits = 0
        self.lookups = 0

    # --- counting ---------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """The number of slots."""
        return self.pages * self.page_size

    @property
    def available(self) -> int:
        """Pages that are free, or that can be freed because only the prefix tree holds them."""
        return len(self._free) + self._idle

    def pages_for(self, slots: int) -> int:
        """How many pages this many slots need."""
        return -(-slots // self.page_size)

    def _hold(self, page: int) -> None:
        if self._refs[page] == 1 and page in self._tree:
            self._idle -= 1
        self._refs[page] += 1

    def _drop(self, page: int) -> None:
        self._refs[page] -= 1
        if self._refs[page] == 0:
            self._free.append(page)
        elif self._refs[page] == 1 and page in self._tree:
            self._idle += 1
            self._tree.released(page)

    def _take(self) -> int:
        if not self._free:
            page = self._tree.evict(lambda p: self._refs[p] == 1)
            if page is None:
                raise IntegrityError("no page is left although some were counted as available")
            self._idle -= 1
            self._refs[page] = 0
            self._free.append(page)
            if self.states is not None:
                self.states.detach(page)
        page = self._free.pop()
        self._refs[page] = 1
        return page

    # --- tables -----------------------------------------------------------------------------------

    def open(
        self,
        tokens: Sequence[int],
        key: PrefixKey = ANY,
        *,
        reuse: bool = True,
    ) -> BlockTable:
        """A table that starts with the longest cached prefix; the last token is never part of it.

        Only prefixes that were published under an equal key are found.
        With recurrent layers the prefix ends at the last page that has a snapshot.
        """
        table = BlockTable(state=None if self.states is None else SequenceState())
        block = key.pattern.block
        if reuse and (block is None or block < len(tokens)):
            pages = self._tree.match(tokens, len(tokens) - 1, key)
            while pages and block and len(pages) * self.page_size % block:
                pages.pop()
            if self.states is not None:
                table.state = self.states.cut(pages)
            for page in pages:
                self._hold(page)
            table.pages = pages
            table.positions = list(range(len(pages) * self.page_size))
            table.shared = len(pages)
            self.lookups += len(tokens)
            self.hits += len(table.positions)
        return table

    def reserve(self, table: BlockTable, nodes: int) -> Moves | None:
        """Gives a table writable slots for `nodes` more nodes; None if there are too few pages.

        A shared page that would be written is replaced by a copy: the moves say what to copy. With
        recurrent layers the table gets a state slot as well, and the state of its prefix.
        """
        states = self.states
        if states is None or (table.state is not None and table.state.slot >= 0):
            return self._reserve_pages(table, nodes)
        moves = self._reserve_pages(table, nodes) if states.available else None
        if moves is None:
            return None
        return Moves(moves.sources, moves.targets, states.open(table))

    def _reserve_pages(self, table: BlockTable, nodes: int) -> Moves | None:
        used, size, pages = len(table.positions), self.page_size, table.pages
        last = used // size
        fits = used + nodes <= size * len(pages) and last == len(pages) - 1
        if fits and self._refs[pages[last]] == 1:  # the common case: the last page has free slots
            return STAY
        need = self.pages_for(used + nodes) - len(pages)
        copies = [i for i in range(last, len(table.pages)) if self._refs[table.pages[i]] > 1]
        if max(need, 0) + len(copies) > self.available:
            return None
        moves = Moves()
        for i in copies:
            old, new = table.pages[i], self._take()
            used_slots = range(min(self.page_size, len(table) - i * self.page_size))
            moves.sources += [old * self.page_size + j for j in used_slots]
            moves.targets += [new * self.page_size + j for j in used_slots]
            table.pages[i] = new
            table.renew()
            self._drop(old)
        for _ in range(need):
            table.pages.append(self._take())
        return moves

    def slots(self, table: BlockTable, nodes: int) -> IntArray:
        """The slots for the KV of the next pass: one per node, after the table's own."""
        size, start = self.page_size, len(table)
        first, last = start // size, (start + nodes - 1) // size
        if first == last:
            begin = table.pages[first] * size + start % size
            return np.arange(begin, begin + nodes)
        places = np.arange(start, start + nodes)
        pages = np.asarray(table.pages[first : last + 1], dtype=np.int64)
        return pages[places // size - first] * size + places % size

    def close_up(self, table: BlockTable, nodes: Sequence[int]) -> Moves:
        """Moves the KV of some nodes of the last pass, in order, to the slots of its leading nodes."""
        slots = self.slots(table, nodes[-1] + 1).tolist()
        wrong = [(slots[node], slots[i]) for i, node in enumerate(nodes) if node != i]
        return Moves([source for source, _ in wrong], [target for _, target in wrong])

    def commit(
        self,
        table: BlockTable,
        positions: IntArray,
        keep: Sequence[int],
        reuse: Sequence[int] = (),
        forks: Iterable[int] = (),
    ) -> Moves:
        """Keeps the KV of the nodes `keep` of the last pass, in order, and drops the rest.

        Stale KV stays after the kept one until a node at the same position replaces it. A recurrent
        state goes on through the kept nodes that were drafted; `forks` are positions at which
        other sequences will start.
        """
        if self.states is None:
            return self._keep(table, positions, keep, reuse)
        updates = self.states.advance(table, keep, forks)
        moves = self._keep(table, positions, keep, reuse)
        return Moves(moves.sources, moves.targets, updates)

    def _keep(
        self,
        table: BlockTable,
        positions: IntArray,
        keep: Sequence[int],
        reuse: Sequence[int],
    ) -> Moves:
        size, old, kept = self.page_size, len(table), len(keep)
        if not table.stale and not reuse and (not kept or keep[-1] == kept - 1):
            # The leading nodes, in order: their KV is in the right slots already.
            places = positions[:kept].tolist()
            if kept and table.ordered:
                table.ordered = places[0] == old and places == list(range(old, old + kept))
                if not table.ordered:
                    table.renew()
            table.positions += places
            if (len(table.pages) - 1) * size >= old + kept:
                self._trim(table)
            return STAY
        table.renew()
        fresh = table.valid
        covered = {int(positions[i]) for i in (*keep, *reuse)}
        stale = [i for i in range(fresh, old) if table.positions[i] not in covered]
        order = [old + node for node in keep] + stale + [old + node for node in reuse]

        def slot(place: int) -> int:
            return table.pages[place // size] * size + place % size

        moves = Moves()
        for target, source in enumerate(order, start=fresh):
            if target != source:
                moves.sources.append(slot(source))
                moves.targets.append(slot(target))
        table.positions[fresh:] = (
            [int(positions[i]) for i in keep]
            + [table.positions[i] for i in stale]
            + [int(positions[i]) for i in reuse]
        )
        table.stale = len(stale) + len(reuse)
        places = table.positions[fresh : fresh + kept]
        table.ordered = table.ordered and places == list(range(fresh, fresh + kept))
        self._trim(table)
        return moves

    def _trim(self, table: BlockTable) -> None:
        while len(table.pages) > self.pages_for(len(table)):
            self._drop(table.pages.pop())
        table.shared = min(table.shared, len(table.pages))

    def publish(self, table: BlockTable, tokens: Sequence[int], key: PrefixKey = ANY) -> None:
        """Adds the table's full pages to the prefix tree, if they hold the tokens in order.

        If the tree has a page with the same tokens already, the table takes that page and returns its
        own. So a table that holds a page of the tree holds all pages above it.
        """
        full = min(len(table.positions) - table.stale, len(tokens)) // self.page_size
        if full <= table.shared or not table.ordered:
            return
        for i, page in enumerate(self._tree.insert(tokens, table.pages[:full], key)):
            if i < table.shared:
                continue
            if page == table.pages[i]:
                self._refs[page] += 1  # the tree holds it, too
            else:
                self._hold(page)
                self._drop(table.pages[i])
                table.pages[i] = page
                table.renew()
        table.shared = full
        if self.states is not None:
            self.states.publish(table)

    def fork(self, table: BlockTable, cached: int) -> BlockTable:
        """A table that shares the KV of the first `cached` tokens of another.

        With recurrent layers it shares less if there is no snapshot at that position.
        """
        state = None
        if self.states is not None:
            cached, state = self.states.fork(table, cached)
        pages = table.pages[: self.pages_for(cached)]
        for page in pages:
            self._hold(page)
        return BlockTable(
            pages=pages,
            positions=table.positions[:cached],
            ordered=table.ordered,
            shared=min(table.shared, cached // self.page_size),
            state=state,
        )

    def close(self, table: BlockTable) -> None:
        """Returns a table's pages to the pool and empties the table."""
        for page in reversed(table.pages):
            self._drop(page)
        if self.states is not None:
            self.states.close(table)
        table.pages, table.positions, table.stale, table.shared = [], [], 0, 0
        table.renew()
        table.ordered = True

    # --- integrity --------------------------------------------------------------------------------

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Raises IntegrityError unless pages, tables and tree agree."""
        held: Counter[int] = Counter()
        tables = list(tables)
        if self.states is not None:
            self.states.check_integrity((table.state for table in tables), set(self._tree))
        for table in tables:
            if len(set(table.pages)) != len(table.pages):
                raise IntegrityError(f"a table lists a page twice: {table.pages}")
            if self.pages_for(len(table)) > len(table.pages):
                raise IntegrityError(f"{len(table)} cached tokens in {len(table.pages)} pages")
            if not 0 <= table.stale <= len(table):
                raise IntegrityError(f"{table.stale} of {len(table)} cached tokens are stale")
            if len(set(table.positions)) != len(table.positions):
                raise IntegrityError("a position is kept twice")
            held.update(table.pages)
        idle = 0
        for page in self._tree:
            idle += held[page] == 0
            held[page] += 1
        free = set(self._free)
        if len(free) != len(self._free):
            raise IntegrityError("a page is free twice")
        for page in range(self.pages):
            if self._refs[page] != held[page]:
                raise IntegrityError(
                    f"page {page} is counted {self._refs[page]} times and held {held[page]} times"
                )
            if (page in free) != (held[page] == 0):
                raise IntegrityError(f"page {page} is both free and held, or neither")
        if idle != self._idle:
            raise IntegrityError(f"{idle} pages are idle, {self._idle} are counted so")
