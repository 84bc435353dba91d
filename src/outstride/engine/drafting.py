"""Drafting: every sequence's generator, advanced together, so that rounds are shared passes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any

from outstride.core.contracts import Drafter
from outstride.core.proposal import TARGET, Proposal, Scores
from outstride.core.sequence import Status
from outstride.engine.ledger import Ledger
from outstride.engine.passes import Passes, Turn
from outstride.engine.roster import Roster
from outstride.engine.scheduler import Plan
from outstride.errors import MethodFailed


def _undrafted(turn: Turn) -> Proposal:
    """The settled tokens alone."""
    given = turn.view.given()
    return Proposal(given, len(given))


class Drafting:
    """Runs `propose` before the target's pass and `ahead` during it."""

    def __init__(self, passes: Passes, roster: Roster, ledger: Ledger, chunk: int) -> None:
        self._passes = passes
        self._roster = roster
        self._ledger = ledger
        self._chunk = chunk

    def propose(self, plan: Plan) -> list[Turn]:
        """A proposal for the target from everybody who has a share."""
        turns, rounds = [], {}
        for share in plan.shares:
            view = self._passes.view(share.sequence, self._chunk, share.given)
            turn = Turn(share, view, reading=share.given < share.pending)
            turns.append(turn)
            rounds[turn] = share.sequence.method.drafter.propose(view, share.room)
        for turn, proposal in self._rounds(rounds, _undrafted).items():
            least, most = turn.share.given, turn.share.given + turn.share.room
            if not (proposal.model == TARGET and least <= len(proposal.graph) <= most):
                self._roster.fail(turn.sequence, MethodFailed("a proposal larger than its share"))
            elif prepared := self._roster.guard(
                turn.sequence, self._passes.prepare, turn, proposal
            ):
                turn.proposal = prepared
        return [turn for turn in turns if turn.sequence.status is Status.RUNNING]

    def ahead(self, turns: list[Turn]) -> None:
        """What drafters do while the target works; it becomes their state."""
        rounds = {}
        for turn in turns:
            drafter = turn.sequence.method.drafter
            if type(drafter).ahead is Drafter.ahead:
                continue
            work = self._roster.guard(turn.sequence, drafter.ahead, turn.view, turn.proposal)
            if work is not None:
                rounds[turn] = work
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
                    if self._passes.reserve(turn, wish):
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
                self._ledger.count_round(name, [turn.sequence for turn in proposals])
        return results
