"""`ModelRunner`: the models, their KV pages, and how a proposal becomes the input of a pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from outstride.cache.pool import Moves, PagePool
from outstride.core.block_table import BlockTable
from outstride.core.contracts import (
    CAUSAL,
    AttentionPattern,
    CompletedPass,
    Drafter,
    Exactness,
    Model,
    PassInput,
    PendingPass,
    RecurrentModel,
)
from outstride.core.graph import FloatArray
from outstride.core.prefix_key import PrefixKey
from outstride.core.proposal import TARGET, Proposal, Wants
from outstride.core.sequence import Sequence
from outstride.core.view import EngineContext, View
from outstride.engine.logits_processors import attach, attach_masked
from outstride.errors import MethodFailed
from outstride.policy.draft_budget import Allocation


@dataclass(eq=False, slots=True)
class SequenceStep:
    """One sequence's part in one step."""

    allocation: Allocation
    sequence: Sequence
    view: View
    prefilling: bool
    """Whether this step's allocation leaves settled tokens uncomputed."""
    proposal: Proposal = field(init=False)
    """What the target scores. It is set when drafting is done."""
    rounds: dict[str, Proposal] = field(default_factory=dict)
    """The last proposal that each model scored in this step."""
    head_rounds: dict[str, Proposal] = field(default_factory=dict)
    """The last proposal that each draft head scored in this step: an autoregressive head continues
    from its own hidden states."""


class ModelRunner:
    """Models by name, each with a pool of KV pages.

    A model may be registered from any thread while another one steps the engine: registries that the
    engine iterates over are replaced, never changed in place.
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        end_tokens: Collection[int],
        token_to_bytes: Callable[[int], bytes] | None = None,
    ) -> None:
        self.models: Mapping[str, Model] = {}
        self.pools: dict[str, PagePool] = {}
        self.patterns: Mapping[str, AttentionPattern] = {}
        self._end_tokens = frozenset(end_tokens)
        self._registration = threading.Lock()
        target = models[TARGET]
        self.context = EngineContext(
            {},
            self._end_tokens,
            token_to_bytes,
            target.vocab_size,
            target.draft_heads,
            target.filters,
        )
        self._feature_readers: Mapping[str, Callable[[BlockTable, int], FloatArray]] = {}
        for name, model in models.items():
            self.add(name, model)

    def add(self, name: str, model: Model) -> None:
        """Registers a model under a name, with an empty KV cache. Safe on any thread."""
        with self._registration:
            # The scheduler holds this dictionary. It looks pools up by name and never iterates.
            states = model.state_spec if isinstance(model, RecurrentModel) else None
            self.pools[name] = PagePool(model.pages, model.page_size, states)
            self.patterns = {**self.patterns, name: model.attention_pattern}
            self._feature_readers = {**self._feature_readers, name: model.feature}
            self._set_masked_spec(name, model)
            self.models = {**self.models, name: model}  # last: a method may name it from now on

    def refresh_masked_spec(self, name: str) -> None:
        """Reads again how a model fills in masks, after an adapter was attached to it."""
        with self._registration:
            self._set_masked_spec(name, self.models[name])

    def _set_masked_spec(self, name: str, model: Model) -> None:
        self.context.masked_specs = {**self.context.masked_specs, name: model.masked_spec}

    def pattern(self, name: str, drafter: Drafter) -> AttentionPattern:
        """The attention pattern with which a model computes settled tokens under a method."""
        return self.patterns[name] if name in drafter.masked_models else CAUSAL

    def target_key(self, drafter: Drafter, adapter: str, tenant: str) -> PrefixKey:
        """Under which key a new request shares the target's KV, and what its drafter learns."""
        model = self.models[TARGET]
        digest = model.adapters[adapter] if adapter else ""
        return PrefixKey(model.fingerprint, self.pattern(TARGET, drafter), digest, tenant)

    def prefix_key(self, name: str, sequence: Sequence) -> PrefixKey:
        """Under which key a sequence shares a model's KV. Draft models run without the adapter."""
        if name == TARGET:
            return sequence.key
        pattern = self.pattern(name, sequence.method.drafter)
        return PrefixKey(self.models[name].fingerprint, pattern, "", sequence.key.tenant)

    def _patterns_for(self, drafter: Drafter) -> Mapping[str, AttentionPattern]:
        patterns = self.patterns
        if all(pattern.block is None for pattern in patterns.values()):
            return patterns
        return {name: self.pattern(name, drafter) for name in patterns}

    def view(self, sequence: Sequence, chunk: int) -> View:
        """The view of a sequence, created on first use. It changes nothing else."""
        view = sequence.view
        if view is None:
            layers, patterns = (
                self.models[TARGET].layers,
                self._patterns_for(sequence.method.drafter),
            )
            readers = self._feature_readers
            view = View(sequence, patterns, sequence.limit, 0, chunk, readers, layers, self.context)
            sequence.view = view
        return view

    def open_draft_tables(self, sequence: Sequence) -> None:
        """Gives a running sequence a block table of each other model that its drafter runs."""
        for name in sequence.method.drafter.models:
            if name not in sequence.tables and sequence.tables:
                key = self.prefix_key(name, sequence)
                sequence.tables[name] = self.pools[name].open(sequence.tokens, key)

    def begin_step(
        self, sequence: Sequence, chunk: int, allocation: Allocation | None = None
    ) -> View:
        """Opens draft tables and puts what the plan granted, if there is a plan, into the view."""
        if sequence.method.drafter.models:
            self.open_draft_tables(sequence)
        view = self.view(sequence, chunk)
        view.allotted = 0
        if allocation is not None:
            view.allotted, view.use_draft_head, view.marginal_costs = (
                allocation.given,
                allocation.use_draft_head,
                allocation.marginal_costs,
            )
        return view

    def reserve(self, step: SequenceStep, proposal: Proposal) -> bool:
        """Reserves pages for a round of a draft model or head; False if there are none.

        The plan has reserved the pages of the target's own pass.
        """
        name, sequence = proposal.model, step.sequence
        if proposal.draft_head:
            moves = self.pools[name].reserve(sequence.tables[name], len(proposal.graph))
            self.move(name, moves or Moves())
            return moves is not None
        if name == TARGET:
            if len(proposal.graph) > step.allocation.given + step.allocation.draft:
                raise MethodFailed("a proposal is larger than its allocation")
            return True
        if name in sequence.method.drafter.models and name not in sequence.tables:
            sequence.tables[name] = BlockTable()  # an older sequence took its pages
        if name not in sequence.tables:
            raise MethodFailed(f"a drafter ran {name!r}, which is not among its models")
        moves = self.pools[name].reserve(sequence.tables[name], len(proposal.graph))
        self.move(name, moves or Moves())
        return moves is not None

    def prepare(self, step: SequenceStep, proposal: Proposal, *, draft: bool = False) -> Proposal:
        """Adds the request's logits processors to a proposal, and what the request wants returned."""
        if proposal.draft_head:
            return proposal
        earlier = step.rounds.get(proposal.model)
        first_round = earlier is None and proposal.survivors is None
        if not first_round and not proposal.follows(earlier):
            raise MethodFailed(
                "a later round must continue the earlier round's graph or survivors of it"
            )
        params, prefilling = step.sequence.params, step.prefilling
        if not draft:
            wants, loose = proposal.wants, step.sequence.method.exactness is not Exactness.EXACT
            proposal.exact_match = not loose
            if params.logprobs is not None:
                top = max(params.logprobs, wants.logprobs or 0)
                wants = replace(wants, logprobs=top, logits=wants.logits or loose)
            if prefilling:
                wants = replace(wants, nodes=())
            if params.prompt_logprobs is not None:
                wants = self._with_prompt(step.sequence, proposal, wants, prefilling)
            if params.pooling is not None:
                wants = replace(wants, hidden=(*wants.hidden, self.models[TARGET].layers))
            proposal.wants = wants
        spec = self.context.masked_specs[proposal.model]
        if spec is not None and proposal.model in step.sequence.method.drafter.masked_models:
            size = self.models[proposal.model].vocab_size
            return attach_masked(step.sequence, proposal, self._end_tokens, spec.token, size)
        return attach(step.sequence, proposal, self._end_tokens)

    def _with_prompt(
        self, sequence: Sequence, proposal: Proposal, wants: Wants, prefilling: bool
    ) -> Wants:
        """Adds the log-probabilities of the prompt tokens that follow given nodes."""
        of = {}
        for node in range(proposal.given):
            after = int(proposal.graph.positions[node]) + 1
            if after < sequence.prompt_length:
                of[node] = sequence.tokens[after]
        nodes = sorted({*of, *(() if prefilling else map(int, proposal.wanted))})
        top = max(sequence.params.prompt_logprobs or 0, sequence.params.logprobs or 0)
        return replace(wants, nodes=tuple(nodes), of=of, logprobs=top)

    def forward(self, name: str, proposals: Mapping[SequenceStep, Proposal]) -> PendingPass:
        """One pass of a model. Nodes that an earlier round of this step computed are not repeated.

        Survivors of an earlier round are compacted: their KV moves to the leading slots, in order.
        """
        pool, inputs, moves = self.pools[name], [], Moves()
        for step, proposal in proposals.items():
            table, first, state = step.sequence.tables[name], 0, None
            if proposal.draft_head:  # the target's pass overwrites what it leaves in the slots
                ran = step.head_rounds.get(proposal.draft_head)
                autoregressive = self.context.draft_heads[proposal.draft_head].autoregressive
                if autoregressive and ran is not None and proposal.hidden is None:
                    first = len(ran.graph) if proposal.graph.starts_with(ran.graph) else 0
                step.head_rounds[proposal.draft_head] = proposal
            else:
                ran, survivors = step.rounds.get(name), proposal.survivors
                if survivors is not None:
                    moves.add(pool.close_up(table, survivors))
                if ran is not None and ran.layers == proposal.layers:
                    first = len(ran.graph if survivors is None else survivors)
                step.rounds[name] = proposal
                sequence, fork = step.sequence, None
                if name == TARGET and sequence.pending_forks:
                    fork = sequence.prompt_length - 1
                if pool.states is not None:
                    state = pool.states.begin(table, proposal.given, first, fork)
            slots = pool.slots(table, len(proposal.graph.tokens))
            adapter = step.sequence.params.adapter if name == TARGET else ""
            inputs.append(PassInput(proposal, table, slots, first, state, adapter))
        self.move(name, moves)
        return self.models[name].forward(inputs) if inputs else CompletedPass()

    def move(self, name: str, moves: Moves) -> None:
        """Copies KV of a model between slots, and updates its recurrent states."""
        if moves.sources:
            self.models[name].move(*moves.arrays())
        if moves.states:
            model = self.models[name]
            assert isinstance(model, RecurrentModel)
            model.update_states(moves.states)
