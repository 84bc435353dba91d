"""Drafting: advances the generators of all sequences together, so that rounds share passes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from typing import Any

from outstride.core.contracts import Drafter, PendingPass
from outstride.core.proposal import DEFAULT_WANTS, TARGET, Proposal, Scores
from outstride.core.sequence import Status
from outstride.engine.ledger import Ledger
from outstride.engine.model_runner import ModelRunner, SequenceStep
from outstride.engine.scheduler import Plan
from outstride.engine.sequences import SequenceManager
from outstride.errors import MethodFailed


def _undrafted(step: SequenceStep) -> Proposal:
    """The given nodes alone."""
    given = step.view.given()
    wants = step.sequence.method.drafter.wants or DEFAULT_WANTS
    return Proposal(given, len(given.tokens), wants=wants)


def _passive(drafter: Drafter) -> bool:
    """Whether a drafter with budget 0 returns the given nodes and does nothing else."""
    return not drafter.own_proposal or (
        drafter.cost_aware and not drafter.models and drafter.wants is DEFAULT_WANTS
    )


class Drafting:
    """Runs `propose` before the target's pass and `draft_ahead` during it."""

    def __init__(
        self, runner: ModelRunner, sequences: SequenceManager, ledger: Ledger, chunk: int
    ) -> None:
        self._runner = runner
        self._sequences = sequences
        self._ledger = ledger
        self._chunk = chunk
        self.num_head_runs = 0
        """How many sequences ran a draft head in this step."""
        self.device_chain = False
        """Whether one of these heads finds its chain on the device, overlapped with the target."""

    def propose(self, plan: Plan) -> list[SequenceStep]:
        """A proposal for the target from every sequence that has an allocation."""
        steps: list[SequenceStep] = []
        self.num_head_runs, self.device_chain = 0, False
        rounds, found = {}, {}
        for allocation in plan.allocations:
            sequence = allocation.sequence
            view = self._runner.begin_step(sequence, self._chunk, allocation)
            prefilling = allocation.given < allocation.uncomputed
            step = SequenceStep(allocation, sequence, view, prefilling=prefilling)
            steps.append(step)
            drafter = sequence.method.drafter
            if allocation.draft == 0 and _passive(drafter):
                found[step] = _undrafted(step)  # no generator is needed
            else:
                rounds[step] = drafter.propose(view, allocation.draft)
        if rounds:
            found.update(self._rounds(rounds, _undrafted))
        for step, proposal in found.items():
            given, size = step.allocation.given, len(proposal.graph.tokens)
            in_budget = given <= size <= given + step.allocation.draft
            if not (proposal.model == TARGET and in_budget):
                error = MethodFailed("a proposal is larger than its allocation")
                self._sequences.fail(step.sequence, error)
            elif prepared := self._sequences.run_guarded(
                step.sequence, self._runner.prepare, step, proposal
            ):
                step.proposal = prepared
        return [step for step in steps if step.sequence.status is Status.RUNNING]

    def ahead(self, steps: list[SequenceStep], target: PendingPass) -> None:
        """Runs `draft_ahead` while the target runs; its results become the drafters' states."""
        rounds = {}
        for step in steps:
            drafter = step.sequence.method.drafter
            if not drafter.drafts_ahead:
                continue
            work = self._sequences.run_guarded(
                step.sequence, drafter.draft_ahead, step.view, step.proposal
            )
            if work is not None:
                rounds[step] = work
        if not rounds:
            return
        target.start()
        for step, state in self._rounds(rounds, lambda step: step.sequence.state).items():
            step.sequence.state = state

    def _rounds(
        self,
        rounds: Mapping[SequenceStep, Generator[Proposal, Scores, Any]],
        fallback: Callable[[SequenceStep], Any],
    ) -> dict[SequenceStep, Any]:
        """Each round is one pass per model over everything that the generators yielded for it.

        A generator whose model has no free pages is closed; `fallback` gives its result.
        """
        results: dict[SequenceStep, Any] = {}
        inbox: dict[SequenceStep, Scores | None] = dict.fromkeys(rounds)
        while inbox:
            asked: dict[str, dict[SequenceStep, Proposal]] = {}
            for step, scores in inbox.items():
                try:
                    wish = rounds[step].send(scores)  # type: ignore[arg-type]
                    if self._runner.reserve(step, wish) or self._take(step, wish, rounds, asked):
                        prepared = self._runner.prepare(step, wish, draft=True)
                        asked.setdefault(wish.model, {})[step] = prepared
                    else:
                        rounds[step].close()
                        results[step] = fallback(step)
                except StopIteration as stop:
                    results[step] = stop.value
                except Exception as error:
                    self._sequences.fail(step.sequence, error)
            inbox = {}
            for name, proposals in asked.items():
                inbox.update(
                    zip(proposals, self._runner.forward(name, proposals).wait(), strict=True)
                )
                heads = [
                    proposal.draft_head for proposal in proposals.values() if proposal.draft_head
                ]
                self.num_head_runs += len(heads)
                self.device_chain |= any(
                    self._runner.context.draft_heads[head].device_chain for head in heads
                )
                self._ledger.count_round(name, [step.sequence for step in proposals])
        return results

    def _take(
        self,
        step: SequenceStep,
        wish: Proposal,
        steps: Collection[SequenceStep],
        asked: Mapping[str, Any],
    ) -> bool:
        """Takes pages from younger sequences, for a method that cannot work without its other model."""
        name, own = wish.model, step.sequence
        if TARGET not in own.method.drafter.masked_models:
            return False
        busy = {t.sequence for t in steps if name in t.rounds or t in asked.get(name, ())}
        for other in sorted(self._sequences.running, key=lambda s: -s.id):
            if other.id > own.id and name in other.tables and other not in busy:
                self._runner.pools[name].close(other.tables.pop(name))
                if self._runner.reserve(step, wish):
                    return True
        return False
