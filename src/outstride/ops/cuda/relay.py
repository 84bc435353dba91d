"""`Relay`: the draft and the pass over it that follow a drafted pass, launched right behind it.

Where a trained part drafts a chain, what follows a pass over it is known but for one number: how many
of its tokens held. The card finds that number itself. So the part's next pass and the pass over what
it will draft are described as if all had held, launched at once, and moved back by the card to where
the sequence then stands (`back`). They are under way while the host still reads, decides, plans
and asks; if it asks for just these, the answers are there. If it asks for something else, they were
in vain and no harm is done, for the reasons given in `steps`: all that they wrote stands behind what
the sequence holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from outstride.core.contracts import Work
from outstride.core.graph import IntArray
from outstride.core.proposal import Proposal
from outstride.core.sequence import Table
from outstride.ops.cuda.layout import (
    COLUMNS,
    FIELDS,
    KEYS,
    LEVEL,
    PAGED,
    Card,
    Layout,
    Words,
    compose,
)

if TYPE_CHECKING:
    from outstride.ops.cuda.ahead import Ask
    from outstride.ops.cuda.transfer import Recording, Reply

NODES, ITEMS, ITEMS_AT, PAGES_AT, SLACK, SHIFT = 2, 3, 4, 5, 6, 14
"""Words of the header of a pass that is moved: how many nodes it has, how many items of attention and
where they begin, where its pages begin, by how much it is moved back at the most, and by how much
further on it stands than it is described."""
MOST = 512
"""Items that may be moved."""
KEPT = 1024
"""Descriptions that are kept: the next answers stand behind as many entries once more."""


@dataclass(slots=True)
class Form:
    """The description of a pass of one sequence, which is the same again a step later.

    What differs is where it stands, which the card puts right, and the pages.
    """

    layout: Layout
    """Its words end where pages begin."""
    context: int
    """Behind how many entries it is described."""
    recordings: dict[bool, Recording] = field(default_factory=dict)
    """Without entries that are moved before it, and with them."""

    def words(self, context: int, pages: Sequence[int], place: int) -> Words:
        """The words of the pass behind `context` entries whose tokens come to this row of replies."""
        size = self.layout.pages
        words = np.empty(size + len(pages), dtype=np.int32)
        words[:size] = self.layout.words
        words[size:] = pages
        words[0], words[SHIFT] = place, context - self.context
        return words


class Mould:
    """Describes passes of one kind; many of them are alike but for where they stand.

    level: the nodes all see each other; else they are a chain.
    """

    def __init__(self, windows: Sequence[int | None], card: Card, *, level: bool) -> None:
        (self._window,) = windows
        self._card, self._level = card, level
        self._edges: dict[tuple[int, int], list[int]] = {}
        """By nodes and slack, what decides which blocks are read: places, counted from the context."""
        self._made: dict[tuple[int, ...], Form | None] = {}

    def key(self, context: int, slack: int, nodes: int) -> tuple[int, ...]:
        """What descriptions of passes behind `context` entries, or up to `slack` fewer, differ in."""
        edges = self._edges.get((nodes, slack))
        if edges is None:
            edges = self._edges[nodes, slack] = self._edges_of(nodes, slack)
        return (nodes, slack, *[(context + edge) // KEYS for edge in edges])

    def form(self, key: tuple[int, ...], context: int, rows: int) -> Form | None:
        """A description, for the caller to fill in; None if it has too many items to be moved."""
        nodes, slack, *_ = key
        if key not in self._made:
            if len(self._made) >= KEPT:
                self._made.clear()
            self._made[key] = self._compose(context, slack, nodes, rows)
        made = self._made[key]
        if made is None:
            return None
        return Form(replace(made.layout, words=made.layout.words.copy()), made.context)

    def _tiles(self, nodes: int) -> tuple[int, IntArray, IntArray, IntArray]:
        """The size of tiles, their first nodes, how many each has, and the last that it sees."""
        tile = self._card.tile(1 if self._level else nodes)
        starts = np.arange(0, nodes, tile // self._card.group)
        some = np.minimum(tile // self._card.group, nodes - starts)
        return (
            tile,
            starts,
            some,
            np.full_like(starts, nodes - 1) if self._level else starts + some - 1,
        )

    def _edges_of(self, nodes: int, slack: int) -> list[int]:
        _, starts, _, lasts = self._tiles(nodes)
        edges: list[int] = lasts.tolist()
        if self._window is not None:
            edges += (starts - slack - self._window + 1).tolist()
        return edges

    def _compose(self, context: int, slack: int, nodes: int, rows: int) -> Form | None:
        card, level, window = self._card, self._level, self._window
        tile, starts, some, lasts = self._tiles(nodes)
        found = np.zeros((len(starts), COLUMNS), dtype=np.int64)
        found[:, 0], found[:, 1] = starts, some
        found[:, 3] = LEVEL if level else PAGED
        found[:, 4] = found[:, 8] = (context + lasts) // KEYS + 1
        found[:, 6] = context + nodes if level else context + starts + 1
        found[:, 7] = context + starts
        if window is not None:
            found[:, 5] = np.maximum(context + starts - slack - window + 1, 0) // KEYS
        entries, nothing = context + np.arange(nodes), np.zeros(0, dtype=np.int32)
        made = compose(
            np.zeros_like(entries), entries, entries, [found], nothing, nothing, rows, tile, card
        )
        items = made.words[made.windows[0] : made.end].reshape(-1, FIELDS)
        live = int(np.count_nonzero(items[:, 1]))
        if live > MOST:
            return None
        made.words[[NODES, ITEMS, ITEMS_AT]] = nodes, live, made.windows[0]
        made.words[[PAGES_AT, SLACK]] = made.pages, slack
        return Form(made, context)


@dataclass(slots=True)
class Relay:
    """Two passes that are under way: a draft behind a pass over a chain, and the pass over it."""

    table: Table
    context: int
    """How many entries the sequence has if nothing of the chain held."""
    drafted: IntArray
    """The chain."""
    before: Reply
    """What the target chose behind each of its nodes."""
    pages: list[int]
    known: int
    """How many of these the sequence had; the others are kept for such purposes."""
    part: Proposal
    """What the part was asked last."""
    ask: Ask
    """What the target was asked last."""
    draft: Reply | None = None
    judged: Reply | None = None
    _place: int = -1
    _root: int = -1

    @property
    def place(self) -> int:
        """How many entries the sequence has, now that it is known how much of the chain held."""
        if self._place < 0:
            chosen, drafted = self.before.wait()[:, 0].tolist(), self.drafted.tolist()
            held = 0
            while held < len(drafted) and chosen[held] == drafted[held]:
                held += 1
            self._place, self._root = self.context + held, chosen[held]
        return self._place

    def _here(self, piece: Work, page_size: int) -> bool:
        """Whether a piece of work stands where these passes stand."""
        table, graph, place = piece.table, piece.proposal.graph, self.place
        first, end = place // page_size, (place + len(graph.tokens) - 1) // page_size + 1
        end = min(end, self.known)
        return (
            table is self.table
            and not piece.first
            and len(table.positions) == place
            and not table.stale
            and table.ordered
            and graph.positions.item(0) == place
            and graph.tokens.item(0) == self._root
            and table.pages[first:end] == self.pages[first:end]
        )

    def drafts(self, piece: Work, page_size: int) -> bool:
        """Whether this work is the draft."""
        proposal, part = piece.proposal, self.part
        return (
            proposal.graft == part.graft
            and proposal.hidden is None
            and (proposal.wants is part.wants or proposal.wants == part.wants)
            and proposal.draw == part.draw
            and proposal.offset == part.offset
            and proposal.graph.tokens[1:].tobytes() == part.graph.tokens[1:].tobytes()
            and self._here(piece, page_size)
        )

    def judges(self, piece: Work, page_size: int) -> bool:
        """Whether this work is the pass over what was drafted."""
        proposal, graph = piece.proposal, piece.proposal.graph
        if self.draft is None or proposal.graft:
            return False
        self.draft.wait()
        chain, count = self.draft.chain, len(self.drafted)
        return (
            chain is not None
            and self.ask.again(proposal)
            and proposal.given == 1
            and proposal.equal
            and graph.is_chain
            and len(graph.tokens) == count + 1
            and graph.tokens[1:].tobytes() == chain[:count].tobytes()
            and self._here(piece, page_size)
        )

    def strays(self, piece: Work, page_size: int) -> list[tuple[int, int]]:
        """Entries of the pass over the chain that stand in pages of nobody, and where they belong."""
        place = self.place
        if place + len(piece.slots) <= self.known * page_size:
            return []
        return [
            (self.pages[entry // page_size] * page_size + entry % page_size, slot)
            for entry, slot in enumerate(piece.slots.tolist(), start=place)
            if entry // page_size >= self.known
        ]
