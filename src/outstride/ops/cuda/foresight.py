"""`Foresight`: the passes that will be asked for next, launched before they are.

Two kinds can be known: one more step of sequences that are decoded token by token (`steps`), and the
next draft and the pass over it of a sequence for which a trained part drafts chains (`relay`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from outstride.core.contracts import Work
from outstride.core.graph import IntArray
from outstride.core.proposal import Proposal, Scores
from outstride.core.sequence import Table
from outstride.ops.contract import Wanted
from outstride.ops.cuda import chain
from outstride.ops.cuda.ahead import Ahead, Ask, Trust
from outstride.ops.cuda.choose import COUNT, POSITION
from outstride.ops.cuda.head import Head, Kind, padded
from outstride.ops.cuda.launch import Back, Deferred, Launcher
from outstride.ops.cuda.layout import HEADER, PLACES, Card, Layout, Words
from outstride.ops.cuda.moves import Entries
from outstride.ops.cuda.relay import Form, Mould, Relay
from outstride.ops.cuda.steps import STAGED, Steps
from outstride.ops.cuda.tiles import ordinary
from outstride.ops.cuda.transfer import Reply

_FIRST = np.zeros(1, dtype=np.int64)
"""The nodes of a step that are scored."""


Forms = dict[tuple[int, ...], Form]
"""Descriptions of a sequence's passes, by what they differ in."""


@dataclass(frozen=True, slots=True)
class Started:
    """A pass that has just been launched, and what comes back from it."""

    deferred: Deferred
    layout: Layout
    wanted: Sequence[Wanted]
    head: Head
    kind: Kind
    draws: Words
    """Of the rows that are scored."""
    reply: Reply


@dataclass(slots=True)
class _Asked:
    """What a trained part was asked last, for one sequence."""

    deferred: Deferred
    proposal: Proposal
    table: Table
    head: Head
    kind: Kind
    rows: IntArray
    """Which rows of the pass were scored."""
    reply: Reply
    drafted: torch.Tensor
    """The chain, on the card."""
    forms: Forms = field(default_factory=dict)


@dataclass(slots=True)
class _Judged:
    """The last pass over a chain that a part drafted."""

    deferred: Deferred
    draws: Words
    kind: Kind
    ask: Ask
    table: Table
    head: Head
    forms: Forms = field(default_factory=dict)


class Foresight:
    """What is under way ahead of what was asked for."""

    def __init__(
        self,
        launcher: Launcher,
        entries: Entries,
        card: Card,
        head: Head,
        windows: Sequence[int | None],
        limit: int,
    ) -> None:
        """windows: of the model's layers. limit: positions that exist."""
        self._launcher, self._entries, self._card, self._head = launcher, entries, card, head
        self._windows = tuple(dict.fromkeys(windows))
        self._limit, self._whole = limit, (0, len(windows))
        self._ahead: Ahead | None = None
        self._steps_trust, self._relay_trust = Trust(), Trust(0.6)
        self._asked: _Asked | None = None
        self._judged: _Judged | None = None
        self._relay: Relay | None = None
        self._moulds: dict[str, Mould] = {}

    def clear(self) -> None:
        """Something else is asked for, or entries are moved: what is under way is in vain."""
        self._ahead = None
        if self._relay is not None:
            self._relay_trust.learn(False)
        self._relay = None

    def forget(self) -> None:
        """Buffers or weights are others now."""
        self.clear()
        self._asked = self._judged = None
        self._moulds.clear()

    def match(self, work: Sequence[Work]) -> Callable[[], list[Scores]] | None:
        """The scores of a pass that is under way already; and what comes behind it is launched."""
        if self._relay is not None:
            return self._match_relay(self._relay, work)
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        rows = ahead.match(work, self._card.page_size)
        self._steps_trust.learn(rows is not None)
        if rows is None or ahead.reply is None:
            return None
        return self._go_on(ahead, ahead.reply, rows)

    def behind(self, started: Started) -> None:
        """Launches what will come behind a pass, if that can be known."""
        steps, wanted = started.deferred.batch.steps, started.wanted
        if started.head is not self._head:
            self._note(started)
        elif steps is not None and len(started.draws) == len(wanted) == len(steps):
            self._judged = None  # what follows drafts is not drafts only, then
            asks = [Ask.of(item.proposal) for item in wanted]
            rows = list(range(len(wanted)))
            self._foresee(steps, rows, started.reply, started.draws, asks, started.kind)
        elif len(wanted) == 1:
            self._drafted(started)

    # --- one more step ----------------------------------------------------------------------------

    def _foresee(
        self,
        steps: Steps,
        rows: list[int],
        before: Reply,
        draws: Words,
        asks: list[Ask],
        kind: Kind,
    ) -> None:
        """Works out the next pass; launches it if the last ones were what was foreseen."""
        following = steps.following(rows, self._card, self._limit)
        if following is None:
            return
        draws = draws.copy()
        draws[:, POSITION] += 1
        self._ahead = ahead = Ahead(following, before, draws, asks, kind)
        if not self._steps_trust.enough:
            return
        count = len(following)
        layout = following.layout(self._windows, padded(count), self._card)
        recorded = self._launcher.recorded(layout, self._whole, kind)
        if recorded is None:
            return
        at, room = layout.head_at, layout.head_rows
        layout.words[at : at + count] = np.arange(count)
        layout.words[at + room : at + room + draws.size] = draws.reshape(-1)
        ahead.reply = self._head.replies.take(count)
        layout.words[0] = ahead.reply.place
        self._launcher.words.post(layout.words)
        recorded.replay()
        ahead.reply.launched()

    def _go_on(self, ahead: Ahead, reply: Reply, rows: list[int]) -> Callable[[], list[Scores]]:
        """Some rows of a pass that is under way: its scores, and the pass behind it."""
        moves = ahead.steps.settle(rows, self._card.page_size)
        if moves:
            self._entries.copy(moves)
        self._judged = None
        asks = [ahead.asks[row] for row in rows]
        self._foresee(ahead.steps, rows, reply, ahead.draws[rows], asks, ahead.kind)

        def found() -> list[Scores]:
            best = reply.wait()[rows]
            if not ahead.kind.several:
                return [Scores(_FIRST, line) for line in best[:, :1, None].transpose(0, 2, 1)]
            return [
                Scores(_FIRST, best[i : i + 1, : min(ask.wants.best, self._head.vocab)])
                for i, ask in enumerate(asks)
            ]

        return found

    # --- the next draft and the pass over it --------------------------------------------------------

    def _note(self, started: Started) -> None:
        """Remembers what a part was asked, if it was asked for one chain behind one sequence."""
        self._asked = None
        wanted, batch = started.wanted, started.deferred.batch
        found = started.head.chain
        if found is None or not started.reply.length or len(batch.windows) != 1:
            return
        item = wanted[0]
        self._asked = _Asked(
            started.deferred, item.proposal, batch.spans[0].table, started.head, started.kind,
            item.nodes, started.reply, found.drafted,
        )  # fmt: skip

    def _drafted(self, started: Started) -> None:
        """Behind a pass over just the chain that was drafted for it, the same will come again."""
        asked, (item,), (span, *others) = (
            self._asked, started.wanted, started.deferred.batch.spans,
        )  # fmt: skip
        proposal, graph = item.proposal, span.graph
        if asked is None or asked.table is not span.table or others or len(self._windows) > 1:
            return
        guessed, count = asked.reply.chain, len(graph.tokens) - 1
        if (
            guessed is None
            or not 0 < count <= len(guessed)
            or proposal.given != 1
            or not proposal.equal  # else more may hold than the card takes for held
            or len(item.nodes) != count + 1
            or proposal.layers is not None
            or not np.array_equal(graph.tokens[1:], guessed[:count])
            or not ordinary(span, self._card.page_size)
        ):
            return
        if self._judged is not None and self._judged.table is span.table:
            self._relay_trust.learn(True)  # this could have been known
        self._judged = _Judged(
            started.deferred, started.draws.copy(), started.kind, Ask.of(proposal), span.table,
            started.head,
        )  # fmt: skip
        self._run_on(asked, self._judged, span.table, graph.tokens[1:], started.reply)

    def _run_on(
        self, asked: _Asked, judged: _Judged, table: Table, drafted: IntArray, before: Reply
    ) -> None:
        """Launches the next draft and the pass over it, as if all of the chain had held."""
        card, least = self._card, len(table.positions) + 1
        count, most = len(drafted), least + len(drafted)
        block = len(asked.proposal.graph.tokens)
        end = most + max(block, count + 1)
        further = -(-end // card.page_size) - len(table.pages)
        if not self._relay_trust.enough or end > self._limit or further > STAGED:
            return
        draft, pass_ = self._draft_form(asked, most, count), self._pass_form(judged, most, count)
        if draft is None or pass_ is None:
            return
        own = card.spare // card.page_size + 1
        pages = [*table.pages, *range(own, own + max(further, 0))]
        relay = Relay(
            table, least, drafted, before, pages, len(table.pages), asked.proposal, judged.ask
        )
        relay.draft = self._start(draft, asked, most, pages, len(asked.rows), asked.drafted)
        relay.draft.length = len(asked.rows)
        relay.judged = self._start(pass_, judged, most, pages, count + 1, asked.drafted)
        self._relay = relay

    def _mould(self, part: str, windows: Sequence[int | None], level: bool) -> Mould:
        if part not in self._moulds:
            self._moulds[part] = Mould(windows, self._card, level=level)
        return self._moulds[part]

    def _draft_form(self, asked: _Asked, most: int, slack: int) -> Form | None:
        """The part's next pass."""
        proposal, rows = asked.proposal, asked.rows
        nodes = len(proposal.graph.tokens)
        mould = self._mould(proposal.graft, asked.deferred.batch.windows, True)
        key = mould.key(most, slack, nodes)
        if key in asked.forms:
            return asked.forms[key]
        form = mould.form(key, most, padded(nodes))
        if form is not None:
            words = form.layout.words
            words[HEADER : HEADER + nodes] = proposal.graph.tokens
            chain.describe(words, len(rows), proposal.draw, form.context + int(rows[0]))
            _enter_rows(form.layout, rows)[:, COUNT] = asked.head.several(proposal)
            asked.forms[key] = form
        return form

    def _pass_form(self, judged: _Judged, most: int, slack: int) -> Form | None:
        """The pass over what the part will draft."""
        mould = self._mould("", self._windows, False)
        key = mould.key(most, slack, slack + 1)
        if key in judged.forms:
            return judged.forms[key]
        form = mould.form(key, most, padded(slack + 1))
        if form is not None:
            rows = np.arange(slack + 1)
            draws = _enter_rows(form.layout, rows)
            draws[:] = judged.draws
            draws[:, POSITION] = form.context + rows + judged.ask.offset
            judged.forms[key] = form
        return form

    def _start(
        self,
        form: Form,
        of: _Asked | _Judged,
        context: int,
        pages: list[int],
        rows: int,
        drafted: torch.Tensor,
    ) -> Reply:
        """Launches a pass that the card moves to where its sequence will stand."""
        reply = of.head.replies.take(rows)
        words = form.words(context, pages, reply.place)
        moves = self._entries.due
        if not self._launcher.again(form.recordings.get(moves), words):
            layout = self._launcher.fit(replace(form.layout, words=words))
            back = Back(self._head.chosen, drafted, draft=of.head is not self._head)
            started = self._launcher.start(
                layout, of.deferred, padded(rows), of.kind, of.head, cut=False, back=back
            )
            if started is not None:
                form.recordings[moves] = started
        reply.launched()
        return reply

    def _match_relay(self, relay: Relay, work: Sequence[Work]) -> Callable[[], list[Scores]] | None:
        """The draft that is under way, or the pass over it; and what comes behind that."""
        asked, judged, size = self._asked, self._judged, self._card.page_size
        if len(work) == 1 and asked is not None and judged is not None:
            (piece,) = work
            item = Wanted(piece.proposal, piece.proposal.wanted, None, 0)
            if relay.draft is not None and relay.drafts(piece, size):
                asked.proposal, asked.reply = piece.proposal, relay.draft
                return asked.head.collect([item], relay.draft, True)
            if relay.judged is not None and relay.judges(piece, size):
                self._relay = None
                self._relay_trust.learn(True)
                if strays := relay.strays(piece, size):
                    self._entries.move(*np.asarray(strays).T)
                drafted = piece.proposal.graph.tokens[1:]
                self._run_on(asked, judged, piece.table, drafted, relay.judged)
                return self._head.collect([item], relay.judged, True)
        self.clear()
        return None


def _enter_rows(layout: Layout, rows: IntArray) -> Words:
    """Enters which rows are scored; returns the words of their draws."""
    words, at, room, count = layout.words, layout.head_at, layout.head_rows, len(rows)
    words[at : at + count] = rows
    return words[at + room : at + room + count * PLACES].reshape(count, PLACES)
