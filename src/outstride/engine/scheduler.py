"""Which sequences take part in the next pass, and how many nodes each may use.

There are no phases. A sequence has settled tokens that the target has not computed (uncomputed): a
decoding sequence has one of them, a new prompt has many. Each step hands out a budget of nodes:

1. every decoding sequence gets the node of its token, and what its method needs at least;
2. prompts take from what is left, oldest first, in prefill chunks: a long prompt never holds up the
   others, and where the cost of passes is known, prefill does not make passes much longer;
3. drafts of a size of their own allocation the rest, best expected gain per node first;
4. drafts that leave their size to the plan get the nodes that are worth what they cost in this pass, by
   the draft policy: many when a sequence is alone, none when the machine is fully used.

When pages run out, drafts are cut first. Then the youngest sequence is preempted: it keeps its tokens,
loses its KV and is computed again later, which changes nothing of its text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from outstride.cache.pool import Moves, PagePool
from outstride.core.contracts import Demand
from outstride.core.proposal import TARGET
from outstride.core.sequence import Sequence, Status
from outstride.engine.prefill_chunking import (
    DecodingRequest,
    PrefillChunking,
    PrefillingRequest,
    draft_budget,
)
from outstride.policy.draft_budget import Allocation, parts_of
from outstride.policy.policy import DraftPolicy


@dataclass(slots=True)
class Plan:
    """The allocations of a pass, and the KV copies to make before it."""

    allocations: list[Allocation] = field(default_factory=list)
    moves: Moves = field(default_factory=Moves)
    budget: int = 0
    """Nodes that are left to hand out."""
    num_prefilling: int = 0
    """How many sequences want prefill in this pass, those that may be admitted included."""

    def add(self, allocation: Allocation) -> None:
        """Enters an allocation whose pages are reserved."""
        self.allocations.append(allocation)
        self.budget -= allocation.given + allocation.draft


class _Demands(dict[Sequence, Demand]):
    """What each sequence's method demands, asked once per plan."""

    def __init__(self, ask: Callable[[Sequence], Demand]) -> None:
        super().__init__()
        self._ask = ask

    def __missing__(self, sequence: Sequence) -> Demand:
        self[sequence] = self._ask(sequence)
        return self[sequence]


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest pass."""

    nodes: int = 256
    sequences: int = 64


class Scheduler:
    """Continuous batching over one pool of the target's pages."""

    def __init__(
        self, pools: Mapping[str, PagePool], limits: Limits, policy: DraftPolicy | None = None
    ) -> None:
        self._pools = pools
        self._pool = pools[TARGET]
        self.limits = limits
        self.policy = policy or DraftPolicy()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._served: dict[int, int] = {}
        """By sequence: the step of its last allocation."""
        self._step = 0
        self._chunking = PrefillChunking()

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence by priority, and among equals by age."""
        rank, place = (sequence.priority, sequence.id), len(self.waiting)
        while place and (self.waiting[place - 1].priority, self.waiting[place - 1].id) > rank:
            place -= 1
        self.waiting.insert(place, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Drops a sequence that ended and frees its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._served.pop(sequence.id, None)
        self._release(sequence)
        sequence.status = Status.FINISHED

    def _release(self, sequence: Sequence) -> None:
        for model, table in sequence.tables.items():
            self._pools[model].close(table)
        sequence.tables.clear()

    def adopt(self, sequence: Sequence) -> None:
        """Adds a fork, which already has a block table."""
        sequence.status = Status.RUNNING
        self.running.append(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Takes a sequence's pages away; it continues later, before newer ones."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.status = Status.WAITING
        sequence.counts.preempted += 1
        self.add(sequence)

    # --- the plan ---------------------------------------------------------------------------------

    def plan(self, demand_of: Callable[[Sequence], Demand]) -> Plan:
        """Hands out the nodes of the next pass."""
        self._step += 1
        demands = _Demands(demand_of)
        for sequence in list(self.running):  # a method that fails to answer ends its sequence
            demands[sequence]
        uncomputed = {sequence: self._num_uncomputed(sequence) for sequence in self.running}
        prefills = {s: uncomputed[s] > max(1, demands[s].min_nodes) for s in self.running}
        places = self.limits.sequences - len(self.running)
        plan = Plan(budget=self.limits.nodes)
        plan.num_prefilling = sum(prefills.values()) + min(len(self.waiting), places)
        self._chunking.begin(min((s.id for s in self.running if prefills[s]), default=-1))
        if not self._allocate(plan, demands, uncomputed, prefills):
            self._admit(plan, demands)
        if any(allocation.is_prefill for allocation in plan.allocations):
            self._bound_drafts(plan)
        self._widen(plan, demands)
        if any(demand.gains or demand.gains_with_head for demand in demands.values()):
            for grant in self.policy.grants(plan.allocations, demands, plan.budget):
                granted = self._extend(grant.allocation, grant.nodes, plan)
                grant.allocation.gain = sum(grant.gains[:granted])
        for allocation in plan.allocations:
            self._served[allocation.sequence.id] = self._step
        return plan

    def _allocate(
        self,
        plan: Plan,
        demands: _Demands,
        uncomputed: Mapping[Sequence, int],
        prefills: Mapping[Sequence, bool],
    ) -> bool:
        """Allocates what running sequences need at least; whether any sequence was preempted."""
        preempted, served = False, self._served
        order = sorted(
            self.running,  # prefill comes last
            key=lambda s: (prefills[s], served.get(s.id, 0), s.priority, s.id),
        )
        for sequence in order:
            if sequence.status is not Status.RUNNING:
                preempted = True
                continue
            limit = plan.budget
            if prefills[sequence]:
                limit = self._max_prefill(sequence, uncomputed[sequence], plan)
            allocation = self._smallest(
                sequence, uncomputed[sequence], demands[sequence], limit, plan
            )
            if allocation is None:
                continue
            if self._reserve(allocation, plan):
                plan.add(allocation)
            else:
                preempted = True
        return preempted

    def _max_prefill(self, sequence: Sequence, uncomputed: int, plan: Plan) -> int:
        """Nodes of a prefill chunk that hardly delays the decoding sequences of the pass."""
        cost, budget = self.policy.cost_model, plan.budget
        if cost is None or sequence.block is not None:
            return budget
        chunks, decoding = parts_of(plan.allocations)
        if not decoding:
            return budget
        requests = [
            DecodingRequest(
                allocation.sequence.id, allocation.given + allocation.draft, allocation.cached
            )
            for allocation in plan.allocations
            if not allocation.is_prefill
        ]
        prompt = PrefillingRequest(sequence.id, len(sequence.tables[TARGET]), uncomputed)
        return min(
            budget, self._chunking.max_nodes(cost, prompt, chunks, requests, plan.num_prefilling)
        )

    def _num_uncomputed(self, sequence: Sequence) -> int:
        if sequence.order:
            return len(sequence.uncomputed())
        return sequence.tables[TARGET].num_uncomputed(len(sequence.tokens), sequence.block)

    def _smallest(
        self, sequence: Sequence, uncomputed: int, demand: Demand, budget: int, plan: Plan
    ) -> Allocation | None:
        """The smallest useful allocation, or None if this pass has no room for it."""
        reachable, cached = uncomputed, len(sequence.tables[TARGET])
        if demand.prefill_until is not None:
            reachable = min(uncomputed, demand.prefill_until - cached)
        limit = budget if plan.allocations else max(budget, 1)
        chunk = self._chunk_size(reachable, limit, sequence.block)
        min_nodes = demand.min_nodes if chunk == uncomputed else 0
        if chunk + min_nodes > budget and plan.allocations:
            # One canvas that is larger than any pass is let in, or it would wait for ever.
            max_nodes = self.limits.nodes
            if min_nodes <= max_nodes or any(s.draft > max_nodes for s in plan.allocations):
                return None
        if chunk == 0 and min_nodes == 0:
            return None
        return Allocation(sequence, chunk, min_nodes, uncomputed, cached=cached)

    def _chunk_size(self, uncomputed: int, budget: int, block: int | None) -> int:
        """How many uncomputed tokens fit, ending where the model may be cut."""
        if uncomputed <= budget or block is None:
            return max(0, min(uncomputed, budget))  # one canvas may be larger than the budget
        return max(1, budget // block) * block

    def _reserve(self, allocation: Allocation, plan: Plan) -> bool:
        """Reserves the pages of an allocation, by preempting younger sequences if necessary."""
        while True:
            if self._take_pages(allocation, 0, plan):
                return True
            planned = {s.sequence.id for s in plan.allocations}
            victims = [s for s in self.running if s.id not in planned]
            victim = max(victims, key=lambda s: (s.priority, s.id))
            self.preempt(victim)
            if victim is allocation.sequence:
                return False

    def _admit(self, plan: Plan, demands: _Demands) -> None:
        """Admits waiting sequences while nodes and pages last."""
        while self.waiting and len(self.running) < self.limits.sequences and plan.budget > 0:
            sequence = self.waiting[0]
            demand = demands[sequence]
            if sequence.status is Status.FINISHED:
                continue  # its method failed to answer
            params = sequence.params
            whole = params.prompt_logprobs is not None or params.pooling == "mean"
            reuse = not whole or len(sequence.output) > 0
            reuse = reuse and not sequence.order
            table = self._pool.open(sequence.shareable, sequence.key, reuse=reuse)
            missing = len(sequence.tokens) - len(table)
            if self._pool.pages_for(missing) + 1 > self._pool.available and self.running:
                self._pool.close(table)
                break
            sequence.tables = {TARGET: table}
            uncomputed = self._num_uncomputed(sequence)
            limit = self._max_prefill(sequence, uncomputed, plan)
            allocation = self._smallest(sequence, uncomputed, demand, limit, plan)
            moves = (
                self._pool.reserve(table, allocation.given + allocation.draft)
                if allocation
                else None
            )
            if allocation is None or moves is None:
                self._pool.close(table)
                sequence.tables = {}
                break
            plan.moves.add(moves)
            sequence.counts.reused += len(table) if sequence.counts.preempted == 0 else 0
            self.waiting.popleft()
            sequence.status = Status.RUNNING
            self.running.append(sequence)
            plan.add(allocation)

    def _widen(self, plan: Plan, demands: _Demands) -> None:
        """Gives drafts of a size of their own what is left of the budget."""
        wishes = []
        for allocation in plan.allocations:
            demand = demands[allocation.sequence]
            extra = demand.max_nodes - allocation.draft
            if extra > 0 and allocation.given == allocation.uncomputed:
                wishes.append((demand.gain / demand.max_nodes, allocation, extra))
        wishes.sort(key=lambda wish: (-wish[0], wish[1].sequence.id))
        for place, (_, allocation, extra) in enumerate(wishes):
            fair = max(1, plan.budget // (len(wishes) - place)) if plan.budget > 0 else 0
            plan.budget -= self._extend(allocation, min(extra, fair), plan)

    def _bound_drafts(self, plan: Plan) -> None:
        """Lowers the budget of drafts in a pass that prefills while other sequences decode."""
        chunks, decoding = parts_of(plan.allocations)
        cost = self.policy.cost_model
        if cost is not None and chunks and decoding and plan.budget > 0 and cost.usual_step:
            plan.budget = draft_budget(cost, chunks, decoding, plan.budget)

    def _extend(self, allocation: Allocation, nodes: int, plan: Plan) -> int:
        """Adds draft nodes to an allocation as far as there are pages; how many were added."""
        while nodes > 0:
            if self._take_pages(allocation, nodes, plan):
                allocation.draft += nodes
                return nodes
            nodes //= 2
        return 0

    def _take_pages(self, allocation: Allocation, nodes: int, plan: Plan) -> bool:
        """Reserves the pages of an allocation with further nodes; False if there are too few."""
        table = allocation.sequence.tables[TARGET]
        moves = self._pool.reserve(table, allocation.given + allocation.draft + nodes)
        if moves:
            plan.moves.add(moves)
        return moves is not None
