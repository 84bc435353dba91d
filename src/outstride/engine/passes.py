"""Passes: the models, their pages, and how a proposal becomes work for one of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from outstride.cache.pool import Moves, PagePool
from outstride.core.contracts import (
    CAUSAL,
    Done,
    Drafter,
    Exactness,
    Masking,
    Model,
    Pending,
    Vision,
    Work,
)
from outstride.core.graph import FloatArray
from outstride.core.proposal import TARGET, Proposal, Wants
from outstride.core.sequence import Sequence, Setting, Table, View
from outstride.engine.rules import attach, attach_masked
from outstride.engine.scheduler import Share
from outstride.errors import MethodFailed


@dataclass(eq=False, slots=True)
class Turn:
    """One sequence's part in one step."""

    share: Share
    sequence: Sequence
    view: View
    reading: bool
    """Whether this share of the pass does not reach the end of what is settled."""
    proposal: Proposal = field(init=False)
    """What the target scores: there once drafting is done."""
    ran: dict[str, Proposal] = field(default_factory=dict)
    """What each model scored last in this step."""
    asked: dict[str, Proposal] = field(default_factory=dict)
    """What each trained part scored last in this step, where it goes on from its own states."""


class Passes:
    """Models by name, each with a pool of pages."""

    def __init__(
        self,
        models: Mapping[str, Model],
        end_tokens: Collection[int],
        spell: Callable[[int], bytes] | None = None,
    ) -> None:
        self.models: dict[str, Model] = {}
        self.pools: dict[str, PagePool] = {}
        self.visions: dict[str, Vision] = {}
        self._end_tokens = frozenset(end_tokens)
        self._maskings: dict[str, Masking | None] = {}
        target = models[TARGET]
        self.setting = Setting(
            self._maskings,
            self._end_tokens,
            spell,
            target.vocab_size,
            target.grafts,
            target.filters,
        )
        self._readers: dict[str, Callable[[Table, int], FloatArray]] = {}
        for name, model in models.items():
            self.add(name, model)

    def add(self, name: str, model: Model) -> None:
        self.models[name] = model
        self.pools[name] = PagePool(model.pages, model.page_size)
        self.visions[name] = model.vision
        self._maskings[name] = model.masking
        self._readers[name] = model.feature

    def adapted(self, name: str) -> None:
        """Looks again how a model fills in masks: an adapter was attached to it."""
        self._maskings[name] = self.models[name].masking

    def vision(self, name: str, drafter: Drafter) -> Vision:
        """How a model reads settled tokens under a method."""
        return self.visions[name] if name in drafter.fills else CAUSAL

    def _visions(self, drafter: Drafter) -> Mapping[str, Vision]:
        if all(vision.block is None for vision in self.visions.values()):
            return self.visions
        return {name: self.vision(name, drafter) for name in self.models}

    def view(self, sequence: Sequence, chunk: int, share: Share | None = None) -> View:
        """What a method may know of its sequence in this step, before and after the plan."""
        if models := sequence.method.drafter.models:
            for name in models:
                if name not in sequence.tables and sequence.tables:
                    block = self.vision(name, sequence.method.drafter).block
                    table = self.pools[name].open(sequence.tokens, sequence.salt, block)
                    sequence.tables[name] = table
        view = sequence.view
        if view is None:
            layers, visions = self.models[TARGET].layers, self._visions(sequence.method.drafter)
            readers, setting = self._readers, self.setting
            view = View(sequence, visions, sequence.limit, 0, chunk, readers, layers, setting)
            sequence.view = view
        view.allotted = 0
        if share is not None:
            view.allotted, view.ask, view.prices = share.given, share.ask, share.prices
        return view

    def reserve(self, turn: Turn, proposal: Proposal) -> bool:
        """Pages for a round of another model; the target's own were reserved by the plan."""
        name, sequence = proposal.model, turn.sequence
        if proposal.graft:
            moves = self.pools[name].reserve(sequence.tables[name], len(proposal.graph))
            self.move(name, moves or Moves())
            return moves is not None
        if name == TARGET:
            if len(proposal.graph) > turn.share.given + turn.share.room:
                raise MethodFailed("a proposal larger than its share")
            return True
        if name in sequence.method.drafter.models and name not in sequence.tables:
            sequence.tables[name] = Table()  # somebody older took its pages
        if name not in sequence.tables:
            raise MethodFailed(f"a drafter asked {name!r}, which is not among its models")
        moves = self.pools[name].reserve(sequence.tables[name], len(proposal.graph))
        self.move(name, moves or Moves())
        return moves is not None

    def prepare(self, turn: Turn, proposal: Proposal, *, draft: bool = False) -> Proposal:
        """The proposal with the request's rules, wanting also what the request wants to know."""
        if proposal.graft:
            return proposal
        if not proposal.follows(turn.ran.get(proposal.model)):
            raise MethodFailed("a later round must go on with the earlier one's graph or survivors")
        params, reading = turn.sequence.params, turn.reading
        if not draft:
            wants, loose = proposal.wants, turn.sequence.method.exactness is not Exactness.EXACT
            proposal.equal = not loose
            if params.logprobs is not None:
                top = max(params.logprobs, wants.logprobs or 0)
                wants = replace(wants, logprobs=top, logits=wants.logits or loose)
            if reading:
                wants = replace(wants, nodes=())
            if params.prompt_logprobs is not None:
                wants = self._with_prompt(turn.sequence, proposal, wants, reading)
            proposal.wants = wants
        masking = self._maskings[proposal.model]
        if masking is not None and proposal.model in turn.sequence.method.drafter.fills:
            size = self.models[proposal.model].vocab_size
            return attach_masked(turn.sequence, proposal, self._end_tokens, masking.token, size)
        return attach(turn.sequence, proposal, self._end_tokens)

    def _with_prompt(
        self, sequence: Sequence, proposal: Proposal, wants: Wants, reading: bool
    ) -> Wants:
        """Wants the log-probabilities of the prompt tokens that follow given nodes, too."""
        of = {}
        for node in range(proposal.given):
            behind = int(proposal.graph.positions[node]) + 1
            if behind < sequence.prompt_length:
                of[node] = sequence.tokens[behind]
        nodes = sorted({*of, *(() if reading else map(int, proposal.wanted))})
        top = max(sequence.params.prompt_logprobs or 0, sequence.params.logprobs or 0)
        return replace(wants, nodes=tuple(nodes), of=of, logprobs=top)

    def forward(self, name: str, proposals: Mapping[Turn, Proposal]) -> Pending:
        """One pass of a model. Nodes that an earlier round of this step computed are not repeated.

        Of those, survivors close up: node i has its entry behind the i-th, whatever came between.
        """
        pool, work, moves = self.pools[name], [], Moves()
        for turn, proposal in proposals.items():
            table, first = turn.sequence.tables[name], 0
            if proposal.graft:  # what it leaves in the slots, the pass writes over
                ran = turn.asked.get(proposal.graft)
                chained = self.setting.grafts[proposal.graft].chained
                if chained and ran is not None and proposal.hidden is None:
                    first = len(ran.graph) if proposal.graph.starts_with(ran.graph) else 0
                turn.asked[proposal.graft] = proposal
            else:
                ran, survivors = turn.ran.get(name), proposal.survivors
                if survivors is not None:
                    moves.add(pool.close_up(table, survivors))
                if ran is not None and ran.layers == proposal.layers:
                    first = len(ran.graph if survivors is None else survivors)
                turn.ran[name] = proposal
            work.append(Work(proposal, table, pool.slots(table, len(proposal.graph.tokens)), first))
        self.move(name, moves)
        return self.models[name].forward(work) if work else Done()

    def move(self, name: str, moves: Moves) -> None:
        """Copies cache entries of a model."""
        if moves:
            self.models[name].move(*moves.arrays())
