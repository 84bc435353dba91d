"""`StateSlots`: the slots of recurrent states, and which sequences and prefix pages hold them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from outstride.core.block_table import BlockTable
from outstride.core.recurrent import (
    SequenceState,
    Snapshots,
    StateAdvance,
    StateCopy,
    StatePass,
    StateSpec,
    StateUpdate,
)
from outstride.errors import IntegrityError


class StateSlots:
    """A fixed number of slots. A sequence holds one; what is left holds snapshots of prefix pages.

    The least recently used snapshot gives way when a slot is needed, so snapshots never keep a
    sequence out of a pass.
    """

    def __init__(self, spec: StateSpec, page_size: int) -> None:
        self._slots = spec.slots
        self._page_size = page_size
        self._interval = spec.interval
        self._refs = [0] * spec.slots
        self._free = list(range(spec.slots - 1, -1, -1))
        self._snapshots: dict[int, int] = {}
        """By prefix page: the state after its last token; least recently used first."""

    @property
    def available(self) -> bool:
        """Whether a slot is free, or holds a snapshot that nothing else needs."""
        return bool(self._free) or any(self._refs[s] == 1 for s in self._snapshots.values())

    def take(self) -> int | None:
        """A slot; None if all of them are needed."""
        if not self._free:
            page = next((p for p, s in self._snapshots.items() if self._refs[s] == 1), None)
            if page is None:
                return None
            self.detach(page)
        slot = self._free.pop()
        self._refs[slot] = 1
        return slot

    def drop(self, slot: int) -> None:
        """Gives up a slot; it is free when nothing holds it."""
        self._refs[slot] -= 1
        if self._refs[slot] == 0:
            self._free.append(slot)

    def hold(self, slot: int) -> int:
        """Holds a slot once more."""
        self._refs[slot] += 1
        return slot

    # --- prefix pages -------------------------------------------------------------------------------

    def detach(self, page: int) -> None:
        """Drops the snapshot of a page, if it has one."""
        if (slot := self._snapshots.pop(page, None)) is not None:
            self.drop(slot)

    def cut(self, pages: list[int]) -> SequenceState:
        """Removes pages after the last one that has a snapshot; the state that starts there."""
        while pages and pages[-1] not in self._snapshots:
            pages.pop()
        if not pages:
            return SequenceState()
        slot = self._snapshots.pop(pages[-1])
        self._snapshots[pages[-1]] = slot  # the most recently used one
        return SequenceState(source=self.hold(slot))

    def publish(self, table: BlockTable) -> None:
        """Gives the snapshots of the last step to the prefix pages that end there."""
        if table.state is None:
            return
        size, snapshots = self._page_size, table.state.snapshots
        for position in [p for p in snapshots if p % size == 0 and p <= table.shared * size]:
            page, slot = table.pages[position // size - 1], snapshots.pop(position)
            if page in self._snapshots:  # equal prefixes have equal states
                self.drop(slot)
            else:
                self._snapshots[page] = slot

    # --- sequences ----------------------------------------------------------------------------------

    def open(self, table: BlockTable) -> list[StateUpdate]:
        """Gives a table a state slot, and the state of its prefix. One must be available."""
        slot = self.take()
        if slot is None:
            raise IntegrityError("no state slot is left although one was counted as available")
        state = table.state = table.state or SequenceState()
        state.slot = slot
        if state.source < 0:
            return []
        update = StateCopy(state.source, slot)
        self.drop(state.source)
        state.source = -1
        return [update]

    def begin(
        self, table: BlockTable, given: int, first: int, fork: int | None = None
    ) -> StatePass:
        """How the next pass uses the state of a table.

        first: the first node that the pass computes; above 0 in later rounds of a step. In the first
        round, the `given` nodes advance the state.
        fork: a position within the given nodes at which other sequences will start.
        """
        state = table.state
        if state is None or state.slot < 0 or (first and first < state.given):
            raise IntegrityError("a pass needs a state slot, and rounds that continue each other")
        if first:
            return StatePass(state.slot, state.given, False)
        self._forget_snapshots(state)
        state.given, cached = given, len(table)
        wanted = () if fork is None else (fork,)
        snapshots = self._take_snapshots(state, cached, given, wanted)
        return StatePass(state.slot, given, cached == 0, snapshots)

    def advance(
        self, table: BlockTable, keep: Sequence[int], forks: Iterable[int]
    ) -> list[StateUpdate]:
        """Commit: the state goes on through the kept nodes that were drafted."""
        if (state := table.state) is None:
            return []
        given, state.given = state.given, 0
        if list(keep[:given]) != list(range(given)):
            raise IntegrityError(
                f"a recurrent state includes {given} given nodes, and the verdict keeps {list(keep)}"
            )
        accepted = tuple(map(int, keep[given:]))
        if not accepted:
            return []
        snapshots = self._take_snapshots(state, len(table) + given, len(accepted), forks)
        return [StateAdvance(state.slot, accepted, snapshots)]

    def _take_snapshots(
        self, state: SequenceState, start: int, nodes: int, wanted: Iterable[int]
    ) -> Snapshots:
        """Slots for the snapshots of a run of nodes, as far as there are any."""
        end, every = start + nodes, self._interval
        places = {place for place in wanted if start < place <= end}
        places |= set(range(start - start % every + every, end + 1, every))
        found = []
        for place in sorted(places - set(state.snapshots)):
            if (slot := self.take()) is not None:
                state.snapshots[place] = slot
                found.append((place - start, slot))
        return tuple(found)

    def fork(self, table: BlockTable, cached: int) -> tuple[int, SequenceState]:
        """How many of the first `cached` tokens another sequence can share, and its state."""
        if table.state is not None and (slot := table.state.snapshots.get(cached)) is not None:
            return cached, SequenceState(source=self.hold(slot))
        pages = table.pages[: min(cached // self._page_size, table.shared)]
        state = self.cut(pages)
        return len(pages) * self._page_size, state

    def _forget_snapshots(self, state: SequenceState) -> None:
        """Drops the snapshots of a step that no page took."""
        for slot in state.snapshots.values():
            self.drop(slot)
        state.snapshots.clear()

    def close(self, table: BlockTable) -> None:
        """Frees everything that a table holds."""
        if (state := table.state) is None:
            return
        self._forget_snapshots(state)
        for slot in (state.slot, state.source):
            if slot >= 0:
                self.drop(slot)
        table.state = None

    def check_integrity(self, states: Iterable[SequenceState | None], pages: set[int]) -> None:
        """Raises IntegrityError unless slots, sequences and pages agree."""
        held: Counter[int] = Counter(self._snapshots.values())
        for state in states:
            if state is not None:
                held.update(s for s in (state.slot, state.source) if s >= 0)
                held.update(state.snapshots.values())
        if stray := set(self._snapshots) - pages:
            raise IntegrityError(f"pages {sorted(stray)} have a snapshot and are no prefix pages")
        for slot in range(self._slots):
            if self._refs[slot] != held[slot] or (slot in self._free) != (held[slot] == 0):
                raise IntegrityError(
                    f"state slot {slot} is counted {self._refs[slot]} times, held {held[slot]} times"
                )
