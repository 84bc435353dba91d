"""Commit: the only place where verdicts change sequences and caches, the target's or a drafter's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from outstride.cache.pool import Moves
from outstride.core.contracts import Drafter, agreeing
from outstride.core.graph import NodeId
from outstride.core.proposal import TARGET, Proposal, Scores, Verdict
from outstride.core.sampling import logprobs
from outstride.core.sequence import Sequence, Status
from outstride.engine.ledger import Ledger, Progress
from outstride.engine.passes import Passes, Turn
from outstride.engine.roster import Roster


class _Due(NamedTuple):
    """What a pass did for a sequence, to be entered and reported while the next one runs."""

    turn: Turn
    verdict: Verdict
    scores: Scores
    emitted: list[int]


class Commit:
    """Settles tokens, keeps entries, brings forks to life, ends what is over.

    What the next pass depends on is done at once; accounts and reports wait until it runs.
    """

    def __init__(self, passes: Passes, roster: Roster, ledger: Ledger) -> None:
        self._passes = passes
        self._roster = roster
        self._ledger = ledger
        self._due: list[_Due] = []

    @property
    def due(self) -> bool:
        """Whether something waits to be entered or reported."""
        return bool(self._due)

    def __call__(self, verdicts: Mapping[Turn, Verdict], scores: Mapping[Turn, Scores]) -> None:
        moves: dict[str, Moves] = {}
        for turn, verdict in verdicts.items():
            sequence, score = turn.sequence, scores[turn]
            sequence.steps += not turn.reading
            emitted, reason = self._settle(sequence, verdict)
            self._due.append(_Due(turn, verdict, score, emitted))
            self._keep(turn, verdict, moves)
            if not turn.reading:
                drafter = sequence.method.drafter
                told = type(drafter).observe is not Drafter.observe
                if told and sequence.steps > sequence.asleep:
                    verb = self._ledger.turn("propose")
                    sequence.state = self._roster.guard(
                        sequence, drafter.observe, turn.view, turn.proposal, score, verdict
                    )
                    self._ledger.turn(verb)
                    if sequence.status is not Status.RUNNING:
                        continue
            self._fork(turn, verdict)
            if reason is not None:
                self._roster.end(sequence, reason)
        for name, needed in moves.items():
            self._passes.move(name, needed)

    def _settle(self, sequence: Sequence, verdict: Verdict) -> tuple[list[int], str | None]:
        """Enters settled tokens; those without a gap before them are emitted, up to a stop rule."""
        canvas, emitted = sequence.canvas, []
        for position, token in verdict.settled.items():
            if canvas or position != len(sequence.tokens):
                canvas[int(position)] = int(token)
                continue
            emitted.append(int(token))
            if reason := self._roster.append(sequence, int(token)):
                return emitted, reason
        while canvas and (found := canvas.pop(len(sequence.tokens), None)) is not None:
            emitted.append(found)
            if reason := self._roster.append(sequence, found):
                canvas.clear()
                return emitted, reason
        return emitted, None

    def _keep(self, turn: Turn, verdict: Verdict, moves: dict[str, Moves]) -> None:
        """Keeps the entries that hold: by verdict for the target, by agreement for the others."""
        sequence = turn.sequence
        for name, ran in turn.ran.items():
            table, pool = sequence.tables[name], self._passes.pools[name]
            if name == TARGET:
                keep, reuse = verdict.keep, verdict.reuse
                if len(keep) > ran.given:
                    # A stop rule may have cut the accepted run: what lies beyond is nobody's.
                    end, canvas = len(sequence.tokens), sequence.canvas
                    places = ran.graph.positions.tolist()
                    keep = tuple(n for n in keep if places[n] < end or places[n] in canvas)
            elif name in sequence.method.drafter.fills:  # the others saw masks
                keep, reuse = tuple(map(NodeId, range(ran.given))), ()
            else:
                keep = tuple(map(NodeId, agreeing(ran.graph, ran.given, sequence.tokens)))
                reuse = ()
            if needed := pool.commit(table, ran.graph.positions, keep, reuse):
                moves.setdefault(name, Moves()).add(needed)
            if name == TARGET and not table.ordered and len(table) >= len(sequence.order):
                sequence.order = list(table.positions)
            block = sequence.block if name == TARGET else turn.view.block(name)
            tokens = sequence.common if name == TARGET else sequence.tokens
            pool.publish(table, tokens, sequence.salt, block)

    def _fork(self, turn: Turn, verdict: Verdict) -> None:
        """At the end of the prompt for a request's n samples, else where the verdict says."""
        sequence, graph = turn.sequence, turn.proposal.graph
        if sequence.unborn and not turn.reading:
            self._roster.fork(sequence, sequence.prompt_length, sequence.unborn)
            sequence.unborn = 0
        for node, count in verdict.forks.items():
            self._roster.fork(sequence, int(graph.positions[node]) + 1, count)

    # --- accounts -----------------------------------------------------------------------------------

    def accounts(self) -> list[Progress]:
        """Enters what is due in the ledger and says what is new, farewells included."""
        due, self._due = self._due, []
        news: dict[Sequence, list[int]] = {}
        drawn: dict[Sequence, tuple[Proposal, Verdict]] = {}
        for item in due:
            sequence = item.turn.sequence
            if item.scores.logprobs:
                self._note_logprobs(item)
            self._ledger.count(
                sequence,
                item.turn.proposal,
                item.verdict,
                item.emitted,
                item.turn.share.gain,
            )
            if (item.emitted or sequence.painted) and sequence.watched:
                news[sequence] = item.emitted
                if sequence.painted:
                    drawn[sequence] = (item.turn.proposal, item.verdict)
        for sequence in self._roster.leaving():
            news.setdefault(sequence, [])
        told = [self._roster.progress(sequence, emitted) for sequence, emitted in news.items()]
        for progress in told if drawn else ():
            progress.drawn = drawn.get(progress.sequence)
        return told

    def forget(self) -> None:
        """Drops what is due: the engine broke, and everybody has been told."""
        self._due.clear()
        self._roster.leaving()

    def _note_logprobs(self, item: _Due) -> None:
        """Files the log-probabilities of prompt tokens and of what was emitted."""
        scores, verdict = item.scores, item.verdict
        sequence, proposal = item.turn.sequence, item.turn.proposal
        params, start = sequence.params, len(sequence.tokens) - len(item.emitted)
        if verdict.nodes:
            self._note_settled(item)
            return
        trusted = set(verdict.keep) if proposal.offset else set(scores.nodes.tolist())
        for i, (node, row) in enumerate(zip(scores.nodes.tolist(), scores.logprobs, strict=True)):
            position = int(proposal.graph.positions[node]) + proposal.offset
            if position < sequence.prompt_length:
                sequence.prompt_logprobs[position] = row[: (params.prompt_logprobs or 0) + 1]
            elif node in trusted and start <= position < len(sequence.tokens):
                if params.logprobs is None:
                    continue
                token = sequence.tokens[position]
                if row[0][0] != token and scores.logits is not None:  # not the target's own draw
                    row = tuple(logprobs(scores.logits[i], [token], params.logprobs))
                sequence.logprobs[position] = row[: params.logprobs + 1]

    def _note_settled(self, item: _Due) -> None:
        """The same where tokens are settled in any order: as it was at the step of settling."""
        scores, sequence = item.scores, item.turn.sequence
        top = sequence.params.logprobs
        for position, node in item.verdict.nodes.items() if top is not None else ():
            token, i = item.verdict.settled[position], scores.row(node)
            row = scores.logprobs[i]
            if row[0][0] != token and scores.logits is not None:  # not the target's own draw
                row = tuple(logprobs(scores.logits[i], [token], top or 0))
            sequence.logprobs[int(position)] = row[: (top or 0) + 1]
