"""Drafting: every sequence's generator, advanced together, so that rounds are shared passes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from typing import Any

from outstride.core.contracts import Drafter, Pending
from outstride.core.proposal import TARGET, USUAL, Proposal, Scores
from outstride.core.sequence import Status
from outstride.engine.ledger import Ledger
from outstride.engine.passes import Passes, Turn
from outstride.engine.roster import Roster
from outstride.engine.scheduler import Plan
from outstride.errors import MethodFailed


def _undrafted(turn: Turn) -> Proposal:
    """The settled tokens alone."""
    given = turn.view.given()
    wants = turn.sequence.method.drafter.wants or USUAL
    return Proposal(given, len(given.tokens), wants=wants)


def _passive(drafter: Drafter) -> bool:
    """Whether a drafter that is given no room does nothing but look on."""
    return type(drafter).propose is Drafter.propose or (
        drafter.weighed and not drafter.models and drafter.wants is USUAL
    )


class Drafting:
    """Runs `propose` before the target's pass and `ahead` during it."""

    def __init__(self, passes: Passes, roster: Roster, ledger: Ledger, chunk: int) -> None:
        self._passes = passes
        self._roster = roster
        self._ledger = ledger
        self._chunk = chunk
        self.asked = 0
        """How many sequences asked trained parts in this step."""
        self.swift = False
        """Whether a part was among them that is asked, and checked, while others still work."""

    def propose(self, plan: Plan) -> list[Turn]:
        """A proposal for the target from everybody who has a share."""
        turns: list[Turn] = []
        self.asked, self.swift = 0, False
        rounds, found = {}, {}
        for share in plan.shares:
            sequence = share.sequence
            view = self._passes.view(sequence, self._chunk, share)
            turn = Turn(share, sequence, view, reading=share.given < share.pending)
            turns.append(turn)
            drafter = sequence.method.drafter
            if share.room == 0 and _passive(drafter):
                found[turn] = _undrafted(turn)  # nothing to draft, no rounds
            else:
                rounds[turn] = drafter.propose(view, share.room)
        if rounds:
            found.update(self._rounds(rounds, _undrafted))
        for turn, proposal in found.items():
            least, size = turn.share.given, len(proposal.graph.tokens)
            most = least + turn.share.room
            if not (proposal.model == TARGET and least <= size <= most):
                self._roster.fail(turn.sequence, MethodFailed("a proposal larger than its share"))
            elif prepared := self._roster.guard(
                turn.sequence, self._passes.prepare, turn, proposal
            ):
                turn.proposal = prepared
        return [turn for turn in turns if turn.sequence.status is Status.RUNNING]

    def ahead(self, turns: list[Turn], target: Pending) -> None:
        """What drafters do while the target works; it becomes their state."""
        rounds = {}
        for turn in turns:
            drafter = turn.sequence.method.drafter
            if type(drafter).ahead is Drafter.ahead:
                continue  # told apart because it happens for everybody at each step
            work = self._roster.guard(turn.sequence, drafter.ahead, turn.view, turn.proposal)
            if work is not None:
                rounds[turn] = work
        if not rounds:
            return
        target.start()
        for turn, state in self._rounds(rounds, lambda turn: turn.sequence.state).items():
            turn.sequence.state = state

    def _rounds(
        self,
        rounds: Mapping[Turn, Generator[Proposal, Scores, Any]],
        without: Callable[[Turn], Any],
    ) -> dict[Turn, Any]:
        """Each round is one pass per model over what all generators yielded for it.

        A generator whose model has no pages to spare is closed; `without` stands in for its result.
        """
        results: dict[Turn, Any] = {}
        inbox: dict[Turn, Scores | None] = dict.fromkeys(rounds)
        while inbox:
            asked: dict[str, dict[Turn, Proposal]] = {}
            for turn, scores in inbox.items():
                try:
                    wish = rounds[turn].send(scores)  # type: ignore[arg-type]
                    if self._passes.reserve(turn, wish) or self._take(turn, wish, rounds, asked):
                        prepared = self._passes.prepare(turn, wish, draft=True)
                        asked.setdefault(wish.model, {})[turn] = prepared
                    else:
                        rounds[turn].close()
                        results[turn] = without(turn)
                except StopIteration as stop:
                    results[turn] = stop.value
                except Exception as error:
                    self._roster.fail(turn.sequence, error)
            inbox = {}
            for name, proposals in asked.items():
                inbox.update(
                    zip(proposals, self._passes.forward(name, proposals).wait(), strict=True)
                )
                parts = [proposal.graft for proposal in proposals.values() if proposal.graft]
                self.asked += len(parts)
                self.swift |= any(self._passes.setting.grafts[part].swift for part in parts)
                self._ledger.count_round(name, [turn.sequence for turn in proposals])
        return results

    def _take(
        self, turn: Turn, wish: Proposal, turns: Collection[Turn], asked: Mapping[str, Any]
    ) -> bool:
        """Pages from younger sequences, for a method that cannot do without its other model."""
        name, own = wish.model, turn.sequence
        if TARGET not in own.method.drafter.fills:
            return False
        busy = {t.sequence for t in turns if name in t.ran or t in asked.get(name, ())}
        for other in sorted(self._roster.running, key=lambda s: -s.id):
            if other.id > own.id and name in other.tables and other not in busy:
                self._passes.pools[name].close(other.tables.pop(name))
                if self._passes.reserve(turn, wish):
                    return True
        return False
