"""The loop: plan, propose, forward, accept, commit.

Chat, server, bench and tests call `Engine.step`; none of them has a loop of its own. Nothing here
knows a method or a phase: a prompt is a run of given tokens, a draft is nodes behind them, and what
a pass was worth is what its verdict settles and keeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from outstride.core.contracts import Demand, Drafter, Grammar, Method, Model
from outstride.core.graph import NodeId
from outstride.core.params import SamplingParams
from outstride.core.proposal import TARGET, Scores, Verdict
from outstride.core.sequence import Sequence, Status
from outstride.engine.commit import Commit
from outstride.engine.cost import Cost, Drafts
from outstride.engine.drafting import Drafting
from outstride.engine.ledger import Ledger, Progress
from outstride.engine.passes import Passes, Turn
from outstride.engine.roster import Roster
from outstride.engine.scheduler import Limits, Scheduler, pieces_of
from outstride.engine.stopping import Spell

Tell = Callable[[list[Progress]], None]
NOTHING = Demand()
SELDOM = 4
"""Of plain steps of a lone sequence, once in so many it is entered what they took."""


class Engine:
    """One target, any number of other models, one batch of sequences with a method each."""

    def __init__(
        self,
        models: Mapping[str, Model],
        *,
        limits: Limits | None = None,
        end_tokens: Collection[int] = (),
        spell: Spell | None = None,
        cost: Cost | None = None,
    ) -> None:
        limits = limits or Limits()
        self.ledger = Ledger()
        self.passes = Passes(models, end_tokens, spell)
        self.scheduler = Scheduler(self.passes.pools, limits)
        self.scheduler.cost = cost
        self.roster = Roster(self.passes, self.scheduler, end_tokens, spell)
        self.drafting = Drafting(self.passes, self.roster, self.ledger, limits.nodes)
        self.commit = Commit(self.passes, self.roster, self.ledger)

    def step(self, tell: Tell = lambda news: None) -> None:
        """One pass of the target over everybody's proposals.

        What the pass before it did is told while this one runs, if it runs elsewhere.
        """
        try:
            self._step(tell, self.ledger.turn)
        finally:
            self.ledger.turn("")

    def _step(self, tell: Tell, spend: Callable[[str], str]) -> None:
        start = time.perf_counter()
        spend("plan")
        setting = self.passes.setting
        setting.company, setting.clock = max(len(self.scheduler.running), 1), setting.clock + 1
        plan = self.scheduler.plan(self._demand)
        self.passes.move(TARGET, plan.moves)
        spend("propose")
        begun = time.perf_counter()
        turns = self.drafting.propose(plan)
        drafting = time.perf_counter() - begun
        spend("forward")
        pending = self.passes.forward(TARGET, {turn: turn.proposal for turn in turns})
        spend("commit")
        tell(self.commit.accounts())
        spend("propose")
        self.drafting.ahead(turns, pending)
        spend("forward")
        scores = dict(zip(turns, pending.wait(), strict=True))
        spend("accept")
        verdicts = self._accept(scores)
        spend("commit")
        self.commit(verdicts, scores)
        nodes = self.ledger.record(turn.proposal for turn in turns)
        if self.scheduler.cost is not None:
            whole = time.perf_counter() - start
            self._learn(self.scheduler.cost, turns, nodes, whole, drafting)

    def _learn(
        self, cost: Cost, turns: list[Turn], nodes: int, whole: float, drafting: float
    ) -> None:
        """Enters what a step took, and what of that went by while drafts were made."""
        asking = self.drafting.asked
        if self.drafting.swift and len(turns) == 1:
            # The pass was under way while the draft was awaited: only both together are known.
            if turns[0].sequence.method.drafter.weighed:
                further = whole - cost.curve(nodes)[nodes]
                cost.observe_drafting(1, further, Drafts.FORESEEN)
            return
        if not asking:
            cost.rest()
            if len(turns) == 1 and nodes == 1 and self.ledger.steps % SELDOM:
                return  # one plain step is like the next, and a card takes them in no time
        pieces, talking = pieces_of(turn.share for turn in turns)
        guessing = [turn for turn in turns if turn.share.room]
        if guessing and all(turn.sequence.method.drafter.weighed for turn in guessing):
            kind = Drafts.of(asking, foreseen=False)
            cost.observe_drafting(asking or len(guessing), drafting, kind)
        # What drafting takes says nothing of what passes cost, nor what others' takes of ours.
        if all(turn.proposal.layers is None for turn in turns):  # else it was no whole pass
            cost.observe(nodes, whole - drafting, pieces, talking)

    def _demand(self, sequence: Sequence) -> Demand:
        drafter = sequence.method.drafter
        if type(drafter).demand is Drafter.demand or sequence.steps < sequence.asleep:
            return NOTHING  # told apart because it happens for nearly everybody at each step
        view = self.passes.view(sequence, self.scheduler.limits.nodes)
        verb = self.ledger.turn("propose")
        demand = self.roster.guard(sequence, drafter.demand, view) or NOTHING
        self.ledger.turn(verb)
        sequence.asleep = sequence.steps + demand.rest
        return demand

    def _accept(self, scores: Mapping[Turn, Scores]) -> dict[Turn, Verdict]:
        """Each acceptor's verdict; a share that only reads has nothing to judge."""
        verdicts = {}
        for turn, score in scores.items():
            if turn.sequence.status is not Status.RUNNING:
                continue
            if turn.reading:
                verdicts[turn] = Verdict(keep=tuple(map(NodeId, range(turn.proposal.given))))
                continue
            acceptor = turn.sequence.method.acceptor
            found = self.roster.guard(
                turn.sequence, acceptor.accept, turn.view, turn.proposal, score
            )
            if found is not None:
                verdicts[turn] = found
        return verdicts

    # --- requests ---------------------------------------------------------------------------------

    def submit(
        self,
        tokens: list[int],
        params: SamplingParams,
        method: Method,
        *,
        salt: str = "",
        grammar: Grammar | None = None,
        watched: bool = True,
        priority: int = 0,
        fixed: Mapping[int, int] | None = None,
        painted: bool = False,
    ) -> Sequence:
        """Takes a request in; its n samples fork off once the prompt is read.

        Of one that nobody watches, only the end is told; of one that is painted, also what stands
        beyond gaps. `fixed` are tokens behind the prompt that are known already, by position.
        """
        return self.roster.submit(
            tokens, params, method, salt, grammar, watched, priority, fixed, painted
        )

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence at once; what it said so far stays."""
        self.roster.end(sequence, "cancelled")

    @property
    def busy(self) -> bool:
        """Whether a step would do or report anything."""
        scheduler = self.scheduler
        return bool(scheduler.running or scheduler.waiting or self.roster.ended or self.commit.due)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every pool agrees with every table."""
        for name, pool in self.passes.pools.items():
            pool.check_integrity(s.tables[name] for s in self.scheduler if name in s.tables)
