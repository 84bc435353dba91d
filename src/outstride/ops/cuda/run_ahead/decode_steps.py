"""`DecodeSteps`: a pass in which every sequence takes one step, and the pass that will follow it.

While sequences are decoded one token at a time, the next pass is known before this one is done, but
for its tokens, and those are on the GPU. So it can be launched at once and run while the host still
reads, decides and plans. If the host then asks for exactly that pass, or for some of its rows, the
reply is there. If it asks for something else, the results are dropped and no harm is done: the pass
wrote KV only after what sequences hold, into pages that they alone may write, or, where a sequence
needs a new page, into a staging page, from which the KV is copied later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from outstride.core.block_table import StepToken
from outstride.core.contracts import PassInput
from outstride.core.graph import IntArray
from outstride.ops.contract import Span
from outstride.ops.cuda.batch_metadata import AttentionGeometry, BatchMetadata, assemble
from outstride.ops.cuda.metadata import (
    BLOCK_KEYS,
    ITEM_PLACES,
    PAGED,
    PREVIOUS_TOKEN,
    TILE_SIZE,
    Int32Array,
    ItemField,
    RowField,
    TileField,
    row_table,
)
from outstride.ops.cuda.metadata_builder import ordinary

STAGING_PAGES = 64
"""Pages that belong to no sequence, for KV whose page is not known yet."""
SPARE_PAGES = 4
"""By how many pages a sequence may grow before the pages of all are listed anew."""


@dataclass(slots=True)
class DecodeSteps:
    """One row per sequence. KV and nodes are in order in the slots that the pages name."""

    tokens: list[StepToken]
    """Of each sequence: what its block table must be for this pass."""
    inputs: IntArray
    """The input token of each row, or PREVIOUS_TOKEN and below."""
    positions: IntArray
    slots: IntArray
    pages: Int32Array
    """Of all sequences, each with SPARE_PAGES more."""
    pages_at: IntArray
    """Where each sequence's pages begin in `pages`."""
    staged: dict[int, int]
    """Rows whose KV goes to a staging page, and the slot there."""
    template: tuple[BatchMetadata, IntArray] | None = None
    """The metadata of the same sequences some steps ago, and their positions then."""

    @classmethod
    def of(cls, spans: Sequence[Span], page_size: int) -> DecodeSteps | None:
        """These spans, if each is one step of a sequence of its own."""
        for span in spans:
            graph = span.graph
            if len(graph.tokens) != 1 or graph.mixtures or not ordinary(span, page_size):
                return None
        tokens = [span.table.step_token for span in spans]
        if len(set(tokens)) < len(tokens):
            return None
        sizes = np.asarray([len(span.table.pages) + SPARE_PAGES for span in spans])
        listed: list[int] = []
        for span in spans:
            listed += span.table.pages
            listed += (0,) * SPARE_PAGES
        return cls(
            tokens=tokens,
            inputs=np.asarray([span.graph.tokens.item(0) for span in spans]),
            positions=np.asarray([span.graph.positions.item(0) for span in spans]),
            slots=np.asarray([span.slots.item(0) for span in spans]),
            pages=np.asarray(listed, dtype=np.int32),
            pages_at=np.cumsum(sizes) - sizes,
            staged={},
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def following(
        self, rows: list[int], geometry: AttentionGeometry, max_positions: int
    ) -> DecodeSteps | None:
        """The pass after this one, of the sequences of `rows`; None if it cannot be known."""
        positions, pages_at = self.positions[rows] + 1, self.pages_at[rows]
        new_page = np.flatnonzero(positions % geometry.page_size == 0)
        if len(new_page) > STAGING_PAGES or int(positions.max()) >= max_positions:
            return None
        slots, pages, staged = self.slots[rows] + 1, self.pages, {}
        if len(new_page):
            pages = pages.copy()
            for page, row in enumerate(new_page.tolist(), start=geometry.staging_page):
                at = pages_at[row] + positions.item(row) // geometry.page_size
                ends = self.pages_at[self.pages_at > pages_at[row]]
                if at >= (ends.min() if len(ends) else len(pages)):
                    return None
                pages[at] = page
                slots[row] = staged[row] = page * geometry.page_size
        return DecodeSteps(
            tokens=[self.tokens[row].on(1) for row in rows],
            inputs=PREVIOUS_TOKEN - np.asarray(rows),
            positions=positions,
            slots=slots,
            pages=pages,
            pages_at=pages_at,
            staged=staged,
            template=self.template if rows == list(range(len(self))) else None,
        )

    def metadata(
        self, windows: Sequence[int | None], rows: int, geometry: AttentionGeometry
    ) -> BatchMetadata:
        """The metadata of this pass, padded to `rows` rows."""
        count, positions = len(self), self.positions
        if self.template is not None:
            made, before = self.template
            if np.array_equal(positions // BLOCK_KEYS, before // BLOCK_KEYS):
                return self._from_template(made, before)
        tile = np.zeros((count, TILE_SIZE), dtype=np.int64)
        tile[:, TileField.FIRST_ROW], tile[:, TileField.NUM_NODES] = np.arange(count), 1
        tile[:, TileField.PAGES], tile[:, TileField.BLOCK_LIST] = self.pages_at, PAGED
        tile[:, TileField.STOP_BLOCK] = positions // BLOCK_KEYS + 1
        tile[:, TileField.SHARED_STOP] = tile[:, TileField.STOP_BLOCK]
        tile[:, TileField.LIMIT], tile[:, TileField.POSITION] = positions + 1, positions
        tiles = []
        for window in windows:
            tiles.append(tile.copy())
            if window is not None:
                start = np.maximum(positions - window + 1, 0) // BLOCK_KEYS
                tiles[-1][:, TileField.START_BLOCK] = start
        no_lists = np.zeros(0, dtype=np.int32)
        made = assemble(
            self.inputs, positions, self.slots, tiles, self.pages, no_lists, rows,
            geometry.tile(1), geometry,
        )  # fmt: skip
        if tuple(windows) == (None,):
            self.template = replace(made, words=made.words.copy()), positions
        return made

    def _from_template(self, made: BatchMetadata, before: IntArray) -> BatchMetadata:
        """The metadata of an earlier pass, moved to the positions of this one."""
        words, count = made.words.copy(), len(self)
        table = row_table(words, made.rows)
        table[RowField.TOKEN, :count], table[RowField.POSITION, :count] = (
            self.inputs,
            self.positions,
        )
        table[RowField.SLOT, :count] = self.slots
        moved = replace(made, words=words)
        items = moved.live_items()
        moves = (self.positions - before)[items[:, ItemField.TILE]]
        items[:, ITEM_PLACES] += moves[:, None].astype(np.int32)
        words[made.pages_at :] = self.pages
        return moved

    def match(
        self, work: Sequence[PassInput], sampled: IntArray, page_size: int
    ) -> list[int] | None:
        """The rows of this pass that the work asks for; None if some of it is something else.

        sampled: the tokens of the pass before, which are the input of this one.
        """
        tokens, inputs = self.tokens, sampled[PREVIOUS_TOKEN - self.inputs].tolist()
        positions, slots, staged = self.positions.tolist(), self.slots.tolist(), self.staged
        row_of: dict[StepToken, int] | None = None
        rows: list[int] = []
        for i, piece in enumerate(work):
            token, graph, row = piece.table.step_token, piece.proposal.graph, i
            if row_of is not None or i >= len(tokens) or tokens[i] != token:
                if row_of is None:  # some sequences have ended, or the order is another
                    row_of = {token: row for row, token in enumerate(tokens)}
                    for known in rows:
                        del row_of[tokens[known]]
                row = row_of.pop(token, -1)
                if row < 0:
                    return None
            slot = piece.slots.item(0)
            if (
                len(graph.tokens) != 1
                or piece.first
                or graph.tokens.item(0) != inputs[row]
                or graph.positions.item(0) != positions[row]
                or (slot % page_size if row in staged else slot != slots[row])
            ):
                return None
            rows.append(row)
        return rows

    def settle(
        self, rows: list[int], work: Sequence[PassInput], page_size: int
    ) -> list[tuple[int, int]]:
        """Gives matched rows the pages that their sequences got; returns the slots to copy."""
        copies = []
        for row, piece in zip(rows, work, strict=True):
            if row in self.staged:
                slot = piece.slots.item(0)
                copies.append((self.staged[row], slot))
                self.slots[row] = slot
                at = self.pages_at[row] + self.positions[row] // page_size
                self.pages[at] = slot // page_size
        return copies
