"""`DraftAhead`: the next draft and the pass over it, launched right after a pass over a drafted chain.

Where a draft head drafts a chain, what follows the target's pass over it is known but for one number:
how many of its tokens are accepted. The GPU finds that number itself. So the draft head's next pass and
the target's pass over what it will draft are described as if all were accepted, launched at once, and
moved back by the GPU to where the sequence then stands (`realign`). They run while the host still
reads, decides, plans and asks. If it asks for just these, the replies are there. If it asks for
something else, the results are dropped and no harm is done, for the reasons given in `decode_steps`:
all KV that they wrote is after what the sequence holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from outstride.core.block_table import StepToken
from outstride.core.contracts import PassInput
from outstride.core.graph import IntArray
from outstride.core.proposal import Proposal
from outstride.ops.cuda.batch_metadata import AttentionGeometry, BatchMetadata, assemble
from outstride.ops.cuda.metadata import (
    BLOCK_KEYS,
    PAGED,
    SAME_LIMIT,
    TILE_SIZE,
    HeaderField,
    Int32Array,
    TileField,
)

if TYPE_CHECKING:
    from outstride.ops.cuda.cuda_graph import CudaGraph
    from outstride.ops.cuda.host_io import PassReply
    from outstride.ops.cuda.run_ahead.next_step import ScoringRequest

MAX_ITEMS = 512
"""How many work items of attention can be realigned."""
MAX_TEMPLATES = 1024
"""How many templates are kept: the next answers have contexts of the same lengths again."""


@dataclass(slots=True)
class AheadTemplate:
    """The metadata of a pass of one sequence, which is the same again a step later.

    Only its positions, which the GPU sets right, and its pages differ.
    """

    made: BatchMetadata
    """Its words end where pages begin."""
    context: int
    """After how many tokens of context it stands."""
    graphs: dict[bool, CudaGraph] = field(default_factory=dict)
    """Captured without KV that is copied before it, and with it."""

    def words(self, context: int, pages: Sequence[int], reply: int) -> Int32Array:
        """The words of the pass after `context` tokens whose results come to this reply buffer."""
        size = self.made.pages_at
        words = np.empty(size + len(pages), dtype=np.int32)
        words[:size] = self.made.words
        words[size:] = pages
        words[HeaderField.REPLY], words[HeaderField.SHIFT] = reply, context - self.context
        return words


class TemplateBuilder:
    """Makes the metadata of passes of one kind; many differ in their positions alone.

    bidirectional: the nodes all see each other; else they are a chain.
    """

    def __init__(
        self, windows: Sequence[int | None], geometry: AttentionGeometry, *, bidirectional: bool
    ) -> None:
        (self._window,) = windows
        self._geometry, self._bidirectional = geometry, bidirectional
        self._edges: dict[tuple[int, int], list[int]] = {}
        """By nodes and rejected, the places that decide which blocks are read, from the context on."""
        self._made: dict[tuple[int, ...], AheadTemplate | None] = {}

    def key(self, context: int, rejected: int, nodes: int) -> tuple[int, ...]:
        """What templates of passes after `context` tokens, or up to `rejected` fewer, differ in."""
        edges = self._edges.get((nodes, rejected))
        if edges is None:
            edges = self._edges[nodes, rejected] = self._edges_of(nodes, rejected)
        return (nodes, rejected, *[(context + edge) // BLOCK_KEYS for edge in edges])

    def template(self, key: tuple[int, ...], context: int, rows: int) -> AheadTemplate | None:
        """A template, for the caller to fill in; None if it has too many items to be realigned."""
        nodes, rejected, *_ = key
        if key not in self._made:
            if len(self._made) >= MAX_TEMPLATES:
                self._made.clear()
            self._made[key] = self._build(context, rejected, nodes, rows)
        found = self._made[key]
        if found is None:
            return None
        return AheadTemplate(replace(found.made, words=found.made.words.copy()), found.context)

    def _tiles(self, nodes: int) -> tuple[int, IntArray, IntArray, IntArray]:
        """The size of tiles, their first nodes, how many each has, and the last that it sees."""
        tile = self._geometry.tile(1 if self._bidirectional else nodes)
        per = tile // self._geometry.group
        starts = np.arange(0, nodes, per)
        sizes = np.minimum(per, nodes - starts)
        whole = np.full_like(starts, nodes - 1)
        return tile, starts, sizes, whole if self._bidirectional else starts + sizes - 1

    def _edges_of(self, nodes: int, rejected: int) -> list[int]:
        _, starts, _, lasts = self._tiles(nodes)
        edges: list[int] = lasts.tolist()
        if self._window is not None:
            edges += (starts - rejected - self._window + 1).tolist()
        return edges

    def _build(self, context: int, rejected: int, nodes: int, rows: int) -> AheadTemplate | None:
        level, window = self._bidirectional, self._window
        size, starts, sizes, lasts = self._tiles(nodes)
        tile = np.zeros((len(starts), TILE_SIZE), dtype=np.int64)
        tile[:, TileField.FIRST_ROW], tile[:, TileField.NUM_NODES] = starts, sizes
        tile[:, TileField.BLOCK_LIST] = SAME_LIMIT if level else PAGED
        tile[:, TileField.STOP_BLOCK] = (context + lasts) // BLOCK_KEYS + 1
        tile[:, TileField.SHARED_STOP] = tile[:, TileField.STOP_BLOCK]
        tile[:, TileField.LIMIT] = context + nodes if level else context + starts + 1
        tile[:, TileField.POSITION] = context + starts
        if window is not None:
            low = np.maximum(context + starts - rejected - window + 1, 0)
            tile[:, TileField.START_BLOCK] = low // BLOCK_KEYS
        positions, empty = context + np.arange(nodes), np.zeros(0, dtype=np.int32)
        made = assemble(
            np.zeros_like(positions), positions, positions, [tile], empty, empty, rows, size,
            self._geometry,
        )  # fmt: skip
        live = len(made.live_items())
        if live > MAX_ITEMS:
            return None
        header = made.words
        header[HeaderField.NUM_NODES], header[HeaderField.MAX_REJECTED] = nodes, rejected
        header[HeaderField.NUM_ITEMS], header[HeaderField.ITEMS_START] = live, made.windows[0]
        header[HeaderField.PAGES_START] = made.pages_at
        return AheadTemplate(made, context)


@dataclass(slots=True)
class DraftAhead:
    """Two passes under way after a pass over a chain: the next draft, and the target's over it."""

    token: StepToken
    """Of the sequence if nothing of the chain is accepted."""
    drafted: IntArray
    """The chain."""
    before: PassReply
    """Brings what the target sampled after each of its nodes."""
    pages: list[int]
    num_known: int
    """How many of these the sequence had; the others are staging pages."""
    draft_request: Proposal
    """What the draft head was asked last."""
    request: ScoringRequest
    """What the target was asked last."""
    draft: PassReply | None = None
    verify: PassReply | None = None
    _now: StepToken | None = None
    _root: int = -1

    @property
    def now(self) -> StepToken:
        """The token of the sequence, now that it is known how much of the chain is accepted."""
        if self._now is None:
            sampled, drafted = self.before.wait()[:, 0].tolist(), self.drafted.tolist()
            accepted = 0
            while accepted < len(drafted) and sampled[accepted] == drafted[accepted]:
                accepted += 1
            self._now, self._root = self.token.on(accepted), sampled[accepted]
        return self._now

    def _stands_at(self, piece: PassInput, page_size: int) -> bool:
        """Whether a piece of work stands where these passes stand, with the same root.

        Pages past what the sequence holds may have been given back and reserved anew: those that
        nodes of this pass go to are compared.
        """
        table, graph, now = piece.table, piece.proposal.graph, self.now
        position = now.num_cached
        first, end = position // page_size, (position + len(graph.tokens) - 1) // page_size + 1
        end = min(end, self.num_known)
        return (
            table.step_token == now
            and not piece.first
            and graph.positions.item(0) == position
            and graph.tokens.item(0) == self._root
            and table.pages[first:end] == self.pages[first:end]
        )

    def is_draft(self, piece: PassInput, page_size: int) -> bool:
        """Whether this work is the draft."""
        proposal, last = piece.proposal, self.draft_request
        return (
            proposal.draft_head == last.draft_head
            and proposal.hidden is None
            and (proposal.wants is last.wants or proposal.wants == last.wants)
            and proposal.sampling == last.sampling
            and proposal.offset == last.offset
            and proposal.graph.tokens[1:].tobytes() == last.graph.tokens[1:].tobytes()
            and self._stands_at(piece, page_size)
        )

    def is_verify(self, piece: PassInput, page_size: int) -> bool:
        """Whether this work is the target's pass over what was drafted."""
        proposal, graph = piece.proposal, piece.proposal.graph
        if self.draft is None or proposal.draft_head:
            return False
        self.draft.wait()
        chain, count = self.draft.chain, len(self.drafted)
        return (
            chain is not None
            and self.request.same_as(proposal)
            and proposal.given == 1
            and proposal.exact_match
            and graph.is_chain
            and len(graph.tokens) == count + 1
            and graph.tokens[1:].tobytes() == chain[:count].tobytes()
            and self._stands_at(piece, page_size)
        )

    def staged(self, piece: PassInput, page_size: int) -> list[tuple[int, int]]:
        """Slots of the pass over the chain that are in staging pages, and where their KV belongs."""
        position = self.now.num_cached
        if position + len(piece.slots) <= self.num_known * page_size:
            return []
        return [
            (self.pages[at // page_size] * page_size + at % page_size, slot)
            for at, slot in enumerate(piece.slots.tolist(), start=position)
            if at // page_size >= self.num_known
        ]
