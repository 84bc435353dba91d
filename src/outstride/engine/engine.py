"""The loop: plan, propose, forward, accept, commit.

Chat, server, bench and tests call `Engine.step`; none of them has a loop of its own. Nothing here
knows a method or a phase: a prompt is a run of given tokens, a draft is nodes after them, and what a
pass was worth is what its verdict settles and keeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from outstride.core.contracts import Demand, Model
from outstride.core.graph import NodeId
from outstride.core.proposal import TARGET, Scores, Verdict
from outstride.core.sequence import Sequence, Status
from outstride.engine.commit import Commit
from outstride.engine.drafting import Drafting
from outstride.engine.ledger import Ledger, SequenceProgress
from outstride.engine.model_runner import ModelRunner, SequenceStep
from outstride.engine.requests import EngineRequests
from outstride.engine.scheduler import Limits, Scheduler
from outstride.engine.sequences import SequenceManager
from outstride.engine.stopping import TokenToBytes
from outstride.policy.policy import DraftPolicy

Report = Callable[[list[SequenceProgress]], None]
NO_DEMAND = Demand()


class Engine(EngineRequests):
    """One target, any number of other models, one batch of sequences with a method each."""

    def __init__(
        self,
        models: Mapping[str, Model],
        *,
        limits: Limits | None = None,
        end_tokens: Collection[int] = (),
        token_to_bytes: TokenToBytes | None = None,
        policy: DraftPolicy | None = None,
    ) -> None:
        limits = limits or Limits()
        self.policy = policy or DraftPolicy()
        self.ledger = Ledger()
        self.runner = ModelRunner(models, end_tokens, token_to_bytes)
        self.scheduler = Scheduler(self.runner.pools, limits, self.policy)
        self.sequences = SequenceManager(self.runner, self.scheduler, end_tokens, token_to_bytes)
        self.drafting = Drafting(self.runner, self.sequences, self.ledger, limits.nodes)
        self.commit = Commit(self.runner, self.sequences, self.ledger)

    def step(self, report: Report = lambda progress: None) -> None:
        """One pass of the target over the proposals of all sequences.

        What the pass before it did is reported while this one runs, if it runs elsewhere.
        """
        try:
            self._step(report, self.ledger.switch_timer)
        finally:
            self.ledger.switch_timer("")

    def _step(self, report: Report, timer: Callable[[str], str]) -> None:
        start = time.perf_counter()
        timer("plan")
        context = self.runner.context
        context.num_running, context.step = max(len(self.scheduler.running), 1), context.step + 1
        plan = self.scheduler.plan(self._demand)
        self.runner.move(TARGET, plan.moves)
        timer("propose")
        draft_start = time.perf_counter()
        parts = self.drafting.propose(plan)
        draft_seconds = time.perf_counter() - draft_start
        timer("forward")
        pending = self.runner.forward(TARGET, {part: part.proposal for part in parts})
        timer("commit")
        report(self.commit.outputs())
        timer("propose")
        self.drafting.ahead(parts, pending)
        timer("forward")
        scores = dict(zip(parts, pending.wait(), strict=True))
        timer("accept")
        verdicts = self._accept(scores)
        timer("commit")
        self.commit(verdicts, scores)
        nodes = self.ledger.record(part.proposal for part in parts)
        self.policy.observe_step(parts, nodes, time.perf_counter() - start, draft_seconds)

    def _demand(self, sequence: Sequence) -> Demand:
        """What a sequence's drafter demands, unless it backs off."""
        drafter = sequence.method.drafter
        if not drafter.has_demand or sequence.steps < sequence.draft_backoff_until:
            return NO_DEMAND  # the usual case: it must cost next to nothing
        view = self.runner.begin_step(sequence, self.scheduler.limits.nodes)
        verb = self.ledger.switch_timer("propose")
        demand = self.sequences.run_guarded(sequence, drafter.demand, view) or NO_DEMAND
        view.demand = demand
        sequence.draft_backoff_until = sequence.steps + demand.skip_steps
        if demand.skip_steps:
            self.sequences.run_guarded(sequence, drafter.on_backoff, view, demand.skip_steps)
        self.ledger.switch_timer(verb)
        return demand

    def _accept(self, scores: Mapping[SequenceStep, Scores]) -> dict[SequenceStep, Verdict]:
        """Each acceptor's verdict; a prefill chunk keeps all its nodes and settles nothing."""
        verdicts = {}
        for part, score in scores.items():
            sequence = part.sequence
            if sequence.status is not Status.RUNNING:
                continue
            if part.prefilling:
                verdicts[part] = Verdict(keep=tuple(map(NodeId, range(part.proposal.given))))
                continue
            accept = sequence.method.acceptor.accept
            found = self.sequences.run_guarded(sequence, accept, part.view, part.proposal, score)
            if found is not None:
                verdicts[part] = found
        return verdicts
