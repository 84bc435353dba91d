"""`Steps`: a pass in which every sequence takes one step, and the pass that will follow it.

While sequences are decoded one token at a time, the next pass is known before this one is done, but
for its tokens, and those are on the card. So it can be launched at once and be under way while the
host still reads, decides and plans; if the host then asks for exactly that pass, or for some of its
rows, the answer is there. If it asks for something else, the pass was in vain and no harm is done:
it wrote only behind what sequences hold, into pages that they alone may write, or, where a sequence
needs a new page, into a page kept for that purpose, from which the entry is copied later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from outstride.core.contracts import Work
from outstride.core.graph import IntArray
from outstride.core.sequence import Table
from outstride.ops.contract import Span
from outstride.ops.cuda.layout import (
    COLUMNS,
    FIELDS,
    HEADER,
    KEYS,
    PAGED,
    ROW_FIELDS,
    Card,
    Layout,
    Words,
    compose,
)
from outstride.ops.cuda.tiles import ordinary

STAGED = 64
"""Pages kept for sequences that need a new one."""
SLACK = 4
"""Pages by which a sequence may grow before its pages are listed anew."""
CHOSEN = -2
"""Tokens from here downwards: the first, second, … that the pass before chose."""


@dataclass(slots=True)
class Steps:
    """One row per sequence; entries and nodes stand in order in the slots that the pages name."""

    tables: list[Table]
    held: list[list[int]]
    """The pages of each sequence when this was described."""
    tokens: IntArray
    positions: IntArray
    slots: IntArray
    pages: Words
    """Of all sequences, each with a little room."""
    at: IntArray
    """Where each sequence's pages begin."""
    staged: dict[int, int]
    """Rows whose entries go to a page kept for that purpose, and that slot."""
    mould: tuple[Layout, IntArray] | None = None
    """The description of the same sequences some steps ago, and where they stood."""

    @classmethod
    def of(cls, spans: Sequence[Span], page_size: int) -> Steps | None:
        """These spans, if each is one step of a sequence of its own."""
        for span in spans:
            graph = span.graph
            if len(graph.tokens) != 1 or graph.mixtures or not ordinary(span, page_size):
                return None
        tables = [span.table for span in spans]
        if len({id(table) for table in tables}) < len(tables):
            return None
        held = [list(table.pages) for table in tables]
        sizes = np.asarray([len(pages) + SLACK for pages in held])
        listed: list[int] = []
        for pages in held:
            listed += pages
            listed += (0,) * SLACK
        return cls(
            tables=tables,
            held=held,
            tokens=np.asarray([span.graph.tokens.item(0) for span in spans]),
            positions=np.asarray([span.graph.positions.item(0) for span in spans]),
            slots=np.asarray([span.slots.item(0) for span in spans]),
            pages=np.asarray(listed, dtype=np.int32),
            at=np.cumsum(sizes) - sizes,
            staged={},
        )

    def __len__(self) -> int:
        return len(self.tables)

    def following(self, rows: list[int], card: Card, limit: int) -> Steps | None:
        """The pass behind this one, of those sequences; None if it cannot be foreseen.

        limit: positions that exist.
        """
        places = self.positions[rows] + 1
        at = self.at[rows]
        turning = np.flatnonzero(places % card.page_size == 0)
        if len(turning) > STAGED or int(places.max()) >= limit:
            return None
        held = [self.held[row] for row in rows]
        slots, pages, staged = self.slots[rows] + 1, self.pages, {}
        if len(turning):
            pages = pages.copy()
            own = card.spare // card.page_size + 1
            for i, line in enumerate(turning.tolist()):
                new = places.item(line) // card.page_size
                ends = self.at[self.at > at[line]]
                if at[line] + new >= (ends.min() if len(ends) else len(pages)):
                    return None
                pages[at[line] + new] = own + i
                staged[line] = (own + i) * card.page_size
                slots[line] = staged[line]
        return Steps(
            tables=[self.tables[row] for row in rows],
            held=held,
            tokens=CHOSEN - np.asarray(rows),
            positions=places,
            slots=slots,
            pages=pages,
            at=at,
            staged=staged,
            mould=self.mould if rows == list(range(len(self))) else None,
        )

    def layout(self, windows: Sequence[int | None], rows: int, card: Card) -> Layout:
        """The words of this pass."""
        count = len(self.tables)
        places = self.positions
        if self.mould is not None and np.array_equal(places // KEYS, self.mould[1] // KEYS):
            return self._moulded(*self.mould)
        tile = np.zeros((count, COLUMNS), dtype=np.int64)
        tile[:, 0], tile[:, 1] = np.arange(count), 1
        tile[:, 2], tile[:, 3] = self.at, PAGED
        tile[:, 4] = tile[:, 8] = places // KEYS + 1
        tile[:, 6], tile[:, 7] = places + 1, places
        tiles = []
        for window in windows:
            tiles.append(tile.copy())
            if window is not None:
                tiles[-1][:, 5] = np.maximum(places - window + 1, 0) // KEYS
        nothing = np.zeros(0, dtype=np.int32)
        layout = compose(
            self.tokens, places, self.slots, tiles, self.pages, nothing, rows, card.tile(1), card
        )
        if tuple(windows) == (None,):
            self.mould = replace(layout, words=layout.words.copy()), places
        return layout

    def _moulded(self, made: Layout, before: IntArray) -> Layout:
        """The words of an earlier pass, moved to where the sequences stand now."""
        words, count, begin = made.words.copy(), len(self.tables), made.windows[0]
        table = words[HEADER : HEADER + ROW_FIELDS * made.rows].reshape(ROW_FIELDS, made.rows)
        table[0, :count], table[1, :count] = self.tokens, self.positions
        table[2, :count] = self.slots
        items = words[begin : made.end].reshape(-1, FIELDS)
        items = items[: np.count_nonzero(items[:, 1])]
        items[:, 11:13] += (self.positions - before)[items[:, 10]][:, None].astype(np.int32)
        words[made.pages :] = self.pages
        return replace(made, words=words)

    def match(self, work: Sequence[Work], tokens: IntArray, page_size: int) -> list[int] | None:
        """The rows of this pass that this work is; None if some of it is something else.

        tokens: those that the pass before chose.
        """
        tables, chosen = self.tables, tokens[CHOSEN - self.tokens].tolist()
        places, slots = self.positions.tolist(), self.slots.tolist()
        held, staged = self.held, self.staged
        row_of: dict[int, int] | None = None
        rows: list[int] = []
        for i, piece in enumerate(work):
            table, graph = piece.table, piece.proposal.graph
            row = i
            if row_of is not None or i >= len(tables) or tables[i] is not table:
                if row_of is None:  # not everybody is still there, or in another order
                    row_of = {id(table): row for row, table in enumerate(tables)}
                    for known in rows:
                        del row_of[id(tables[known])]
                row = row_of.pop(id(table), -1)
                if row < 0:
                    return None
            place, pages, slot = places[row], table.pages, slots[row]
            if row in staged:
                pages, slot = pages[:-1], pages[-1] * page_size
            if (
                len(graph.tokens) != 1
                or graph.tokens.item(0) != chosen[row]
                or graph.positions.item(0) != place
                or len(table.positions) != place
                or piece.slots.item(0) != slot
                or pages != held[row]
                or table.stale
                or not table.ordered
            ):
                return None
            rows.append(row)
        return rows

    def settle(self, rows: list[int], page_size: int) -> list[tuple[int, int]]:
        """Gives matched rows the pages that their sequences got; returns entries to copy."""
        moves = []
        for row in self.staged.keys() & set(rows):
            pages = self.tables[row].pages
            slot = pages[-1] * page_size
            moves.append((self.staged[row], slot))
            self.held[row], self.slots[row] = list(pages), slot
            self.pages[self.at[row] + len(pages) - 1] = pages[-1]
        return moves
