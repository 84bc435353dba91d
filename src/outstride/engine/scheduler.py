"""Who moves in the next pass, and how many nodes each may spend.

There are no phases. A sequence has settled tokens that the model has not read (`pending`); one that
is being generated has one of them, a fresh prompt has many. Each step hands out a budget of nodes:

1. everybody who has one token pending gets its node, and what its method needs at the least;
2. prompts take from what is left, oldest first, in chunks: a long one never holds up the others, and
   where the cost of passes is known, passes do not take much longer because of them;
3. drafts of a size of their own share the rest, best expected gain per node first;
4. drafts that leave their size to the plan get the nodes that are worth what they cost in this pass,
   by the measured cost of passes: many when nobody else is there, none when the machine is full.

When pages run out, drafts go first, then the youngest sequence is preempted: it keeps its tokens,
loses its entries and is read again later, which changes nothing of what it will say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter

from outstride.cache.pool import Moves, PagePool
from outstride.core.contracts import Demand
from outstride.core.proposal import TARGET
from outstride.core.sequence import Sequence, Status, Table
from outstride.engine.cost import Cost, Drafts
from outstride.engine.pieces import Chunking, Reader, Talker, spare

PROMISE = 1.02
"""What drafting has to promise over not drafting: whoever picks the best estimates picks high ones."""


@dataclass(slots=True)
class Share:
    """One sequence's part in a pass: how many given nodes, and room for how many others."""

    sequence: Sequence
    given: int
    room: int
    pending: int
    """How many settled tokens the target has not read."""
    gain: float = 0.0
    """Accepted tokens expected of nodes that the plan granted for what they are worth."""
    ask: bool = True
    """Whether a trained part is worth asking."""
    prices: tuple[float, ...] = ()
    """What each further node has to promise to be worth its place, where a trained part is asked."""
    cached: int = 0
    """Behind how many entries of the target it stands."""


def pieces_of(shares: Iterable[Share]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """What of a pass reads prompts, and what talks: how many nodes, behind how many entries."""
    reading, talking = [], []
    for share in shares:
        if _reads(share):
            whole = share.given == share.pending
            reading.append((share.given - whole, share.cached))
        else:
            talking.append((share.given + share.room, share.cached))
    return reading, talking


def _reads(share: Share) -> bool:
    """Whether it is a piece of a prompt, the last one too."""
    whole = share.given == share.pending
    return not whole or (share.given > 1 and share.sequence.block is None)


@dataclass(slots=True)
class Plan:
    """The shares of a pass, and the copies to make before it."""

    shares: list[Share] = field(default_factory=list)
    moves: Moves = field(default_factory=Moves)


@dataclass(frozen=True, slots=True)
class _Worth:
    """Nodes that are worth their cost: by sequence, what is expected of each."""

    rate: float
    """Tokens per second."""
    granted: dict[int, list[float]]
    nodes: int
    """Of the pass, those among them."""

    def prices(self, cost: Cost, own: int, most: int) -> tuple[float, ...]:
        """What the next nodes cost in tokens if `own` of the nodes are left out for them."""
        first = self.nodes - own
        curve = cost.curve(first + most)[first : first + most + 1]
        return tuple([self.rate * (after - before) for before, after in pairwise(curve)])


class _Demands(dict[Sequence, Demand]):
    """What each sequence's method asked for, asked once per plan."""

    def __init__(self, ask: Callable[[Sequence], Demand]) -> None:
        super().__init__()
        self._ask = ask

    def __missing__(self, sequence: Sequence) -> Demand:
        self[sequence] = self._ask(sequence)
        return self[sequence]


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one pass may take on."""

    nodes: int = 256
    sequences: int = 64


class Scheduler:
    """Continuous batching over one pool of the target's pages."""

    def __init__(self, pools: Mapping[str, PagePool], limits: Limits) -> None:
        self._pools = pools
        self._pool = pools[TARGET]
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._served: dict[int, int] = {}
        self._clock = 0
        self._chunking = Chunking()
        self.cost: Cost | None = None
        """What passes cost; there as soon as a method wants the plan to weigh its nodes."""

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    def add(self, sequence: Sequence) -> None:
        self._queue(sequence)

    def _queue(self, sequence: Sequence) -> None:
        """By priority, and among equals by age."""
        rank, place = (sequence.priority, sequence.id), len(self.waiting)
        while place and (self.waiting[place - 1].priority, self.waiting[place - 1].id) > rank:
            place -= 1
        self.waiting.insert(place, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence that ended and frees what it held."""
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
        """Takes in a fork that already has a table."""
        sequence.status = Status.RUNNING
        self.running.append(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Takes a sequence's pages away; it goes on later, ahead of newer ones."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.status = Status.WAITING
        sequence.counts.preempted += 1
        self._queue(sequence)

    # --- the plan ---------------------------------------------------------------------------------

    def plan(self, demand_of: Callable[[Sequence], Demand]) -> Plan:
        """Shares out the next pass."""
        self._clock += 1
        plan, budget = Plan(), self.limits.nodes
        demands, served = _Demands(demand_of), self._served
        for sequence in list(self.running):
            demands[sequence]
        pending = {sequence: self._pending(sequence) for sequence in self.running}
        reads = {s: pending[s] > max(1, demands[s].least) for s in self.running}
        order = sorted(
            self.running,  # readers come last
            key=lambda s: (reads[s], served.get(s.id, 0), s.priority, s.id),
        )
        self._chunking.begin(min((s.id for s in self.running if reads[s]), default=-1))
        preempted = False
        places = self.limits.sequences - len(self.running)
        readers = sum(reads.values()) + min(len(self.waiting), places)
        for sequence in order:
            if sequence.status is not Status.RUNNING:
                preempted = True
                continue
            room = budget
            if reads[sequence]:
                room = self._readable(sequence, pending[sequence], budget, readers, plan)
            share = self._least(sequence, pending[sequence], demands[sequence], room, plan)
            if share is None:
                continue
            if not self._reserve(share, plan):
                preempted = True
                continue
            budget -= share.given + share.room
            plan.shares.append(share)
        if not preempted:
            budget = self._admit(plan, demands, budget, readers)
        pieces, talking = pieces_of(plan.shares)
        if self.cost is not None and self.cost.usual and pieces and talking and budget > 0:
            budget = spare(self.cost, pieces, talking, budget)
        budget = self._widen(plan, demands, budget)
        self._weigh(plan, demands, budget)
        for share in plan.shares:
            served[share.sequence.id] = self._clock
        return plan

    def _readable(
        self, sequence: Sequence, pending: int, budget: int, readers: int, plan: Plan
    ) -> int:
        """How much a prompt may read in a pass in which others talk, so that these hardly wait."""
        pieces, talking = pieces_of(plan.shares)
        if self.cost is None or not talking or sequence.block is not None:
            return budget
        talkers = [
            Talker(share.sequence.id, share.given + share.room, share.cached)
            for share in plan.shares
            if not _reads(share)
        ]
        reader = Reader(sequence.id, len(sequence.tables[TARGET]), pending)
        return min(budget, self._chunking.most(self.cost, reader, pieces, talkers, readers))

    def _pending(self, sequence: Sequence) -> int:
        if sequence.order:
            return len(sequence.unread())
        return sequence.tables[TARGET].lacking(len(sequence.tokens), sequence.block)

    def _least(
        self, sequence: Sequence, pending: int, demand: Demand, budget: int, plan: Plan
    ) -> Share | None:
        """The smallest useful share, or None if this pass has no place for it."""
        readable = pending
        if demand.until is not None:
            readable = min(pending, demand.until - len(sequence.tables[TARGET]))
        chunk = self._chunk(readable, budget if plan.shares else max(budget, 1), sequence.block)
        least = demand.least if chunk == pending else 0
        if chunk + least > budget and plan.shares:
            # One canvas that no pass has room for is let in, or it would wait for ever.
            most = self.limits.nodes
            if least <= most or any(share.room > most for share in plan.shares):
                return None
        if chunk == 0 and least == 0:
            return None
        return Share(sequence, chunk, least, pending, cached=len(sequence.tables[TARGET]))

    def _chunk(self, pending: int, budget: int, block: int | None) -> int:
        """How much of what is pending fits, ending where the model may be cut."""
        if pending <= budget or block is None:
            return max(0, min(pending, budget))  # one canvas may be larger than the budget
        return max(1, budget // block) * block

    def _reserve(self, share: Share, plan: Plan) -> bool:
        """Pages for a share, by preempting younger sequences if need be."""
        while True:
            table = share.sequence.tables[TARGET]
            moves = self._pool.reserve(table, share.given + share.room)
            if moves is not None:
                if moves:
                    plan.moves.add(moves)
                return True
            planned = {s.sequence.id for s in plan.shares}
            victims = [s for s in self.running if s.id not in planned]
            victim = max(victims, key=lambda s: (s.priority, s.id))
            self.preempt(victim)
            if victim is share.sequence:
                return False

    def _admit(self, plan: Plan, demands: _Demands, budget: int, readers: int) -> int:
        """Takes in waiting sequences while nodes and pages last."""
        while self.waiting and len(self.running) < self.limits.sequences and budget > 0:
            sequence = self.waiting[0]
            demand = demands[sequence]
            if sequence.status is Status.FINISHED:
                continue  # its method failed to say what it wants
            reuse = sequence.params.prompt_logprobs is None or len(sequence.output) > 0
            reuse = reuse and not sequence.order
            table = self._pool.open(sequence.common, sequence.salt, sequence.block, reuse=reuse)
            unread = len(sequence.tokens) - len(table)
            if self._pool.pages_for(unread) + 1 > self._pool.available and self.running:
                self._pool.close(table)
                break
            sequence.tables = {TARGET: table}
            pending = self._pending(sequence)
            room = self._readable(sequence, pending, budget, readers, plan)
            share = self._least(sequence, pending, demand, room, plan)
            moves = self._pool.reserve(table, share.given + share.room) if share else None
            if share is None or moves is None:
                self._pool.close(table)
                sequence.tables = {}
                break
            plan.moves.add(moves)
            sequence.counts.reused += len(table) if sequence.counts.preempted == 0 else 0
            self.waiting.popleft()
            sequence.status = Status.RUNNING
            self.running.append(sequence)
            budget -= share.given + share.room
            plan.shares.append(share)
        return budget

    def _widen(self, plan: Plan, demands: _Demands, budget: int) -> int:
        """Gives drafts of a given size what is left."""
        wishes = []
        for share in plan.shares:
            demand = demands[share.sequence]
            extra = demand.most - share.room
            if extra > 0 and share.given == share.pending:
                wishes.append((demand.gain / demand.most, share, extra))
        wishes.sort(key=lambda wish: (-wish[0], wish[1].sequence.id))
        for place, (_, share, extra) in enumerate(wishes):
            fair = max(1, budget // (len(wishes) - place)) if budget > 0 else 0
            extra = min(extra, fair)
            while extra > 0:
                table: Table = share.sequence.tables[TARGET]
                moves = self._pool.reserve(table, share.given + share.room + extra)
                if moves is not None:
                    plan.moves.add(moves)
                    share.room += extra
                    budget -= extra
                    break
                extra //= 2
        return budget

    def _weigh(self, plan: Plan, demands: _Demands, budget: int) -> None:
        """Grants nodes, best first, as far as tokens per second are expected to rise.

        Where trained parts could be asked first, they are, if that promises more than not asking.
        """
        if self.cost is None or budget <= 0:
            return
        if not any(demand.gains or demand.asking for demand in demands.values()):
            return
        emitting = [share for share in plan.shares if share.given == share.pending]
        asking = [share for share in emitting if demands[share.sequence].asking]
        chosen = self._worth(plan, emitting, demands, budget, asking=0)
        if asking:
            asked = self._worth(plan, emitting, demands, budget, asking=len(asking))
            for share in asking:
                share.ask = asked.rate > chosen.rate
            if asked.rate > chosen.rate:
                chosen = asked
        for share in emitting:
            gains = chosen.granted.get(share.sequence.id, [])
            room = len(gains)
            if share.ask and demands[share.sequence].asking and room:
                demand = demands[share.sequence]
                room = min(2 * room, len(demand.asking))  # priced when it is known
                share.prices = chosen.prices(self.cost, len(gains), room)
                if demand.whole:
                    room = len(demand.asking)
            table: Table = share.sequence.tables[TARGET]
            while room:
                moves = self._pool.reserve(table, share.given + share.room + room)
                if moves is not None:
                    plan.moves.add(moves)
                    share.room += room
                    share.gain = sum(gains[:room])
                    break
                room //= 2

    def _worth(
        self, plan: Plan, emitting: list[Share], demands: _Demands, budget: int, *, asking: int
    ) -> _Worth:
        """What is worth granting if so many ask their trained parts, or nobody does."""
        assert self.cost is not None
        offers: list[tuple[float, int, Share]] = []
        for share in emitting:
            demand = demands[share.sequence]
            gains = (asking and demand.asking) or demand.gains
            offers += [(gain, -place, share) for place, gain in enumerate(gains[:budget])]
        if len(emitting) > 1:  # those of one are falling
            offers.sort(key=itemgetter(0, 1), reverse=True)
            del offers[budget:]
        nodes = sum(share.given + share.room for share in plan.shares)
        reading = sum(max(share.given - 1, 0) for share in emitting) + sum(
            share.given for share in plan.shares if share.given < share.pending
        )
        curve = self.cost.curve(nodes + len(offers))
        # Prompts are read in any case: what they cost does not make drafts any cheaper.
        base = curve[max(nodes - reading, 1)] - curve[nodes]
        undrafted = base + curve[nodes]
        whole = asking > 0 and any(demands[share.sequence].whole for share in emitting)
        kind = Drafts.of(asking, foreseen=whole and len(plan.shares) == 1)
        base += self.cost.drafting(asking or len(emitting) or 1, kind)
        tokens, worth = float(len(emitting)), 0
        best = PROMISE * tokens / undrafted
        for count, (gain, _, _) in enumerate(offers, start=1):
            tokens += gain
            if whole and count < len(offers):
                continue  # it is drafted to the end or not at all
            rate = tokens / (base + curve[nodes + count])
            if rate > best:
                best, worth = rate, count
        granted: dict[int, list[float]] = {}
        for gain, _, share in offers[:worth]:
            granted.setdefault(share.sequence.id, []).append(gain)
        return _Worth(best, granted, nodes + worth)
