"""Measures what passes cost, at the start: a curve over nodes, and what it costs to read prompts."""

from __future__ import annotations

import time

import numpy as np

from outstride.cache.pool import PagePool
from outstride.core.contracts import Model, Work
from outstride.core.graph import chain, tree
from outstride.core.proposal import Proposal, Wants
from outstride.core.sequence import Table
from outstride.engine.cost import CACHED, HALF, TILE, Cost, Reading

KNOTS = (1, 2, 4, HALF, HALF + 1, TILE, TILE + 1, 32, 64)
ROUNDS, LARGE = 5, 16
"""How often passes are timed, and from how many nodes on less often: they take long."""
CANDIDATES = 8
FLAT = 2.0
"""If a pass over many nodes takes less than so many times as long as one over one, they are cheap."""
FAR = 2048
"""Behind so many entries it is measured what reading costs there."""
PIECE = 16
"""Nodes of such a piece of a prompt."""


def measure(model: Model, pool: PagePool, most: int, *, reading: bool = False) -> Cost | None:
    """Times real passes over trees behind some entries; None while there is no room.

    reading: also what it costs to read on in a long prompt, for those who are going to serve many.
    """
    knots = [n for n in KNOTS if n <= max(most, 1)]
    room = min(pool.available * pool.page_size, model.context) - CACHED
    knots = [n for n in knots if n <= room]
    table = Table()
    if not knots or pool.reserve(table, CACHED + knots[-1]) is None:
        return None
    clock = _Clock(model, pool, table)
    times: dict[int, list[float]] = {nodes: [] for nodes in knots}
    clock.run(CACHED)
    table.positions = list(range(CACHED))
    for nodes in reversed(knots):  # in a row, as they come: the first finds traces of another
        for turn in range(ROUNDS + 1):
            if turn < ROUNDS - 1 or nodes < LARGE:
                times[nodes].append(clock.run(nodes))
    cost = Cost({nodes: _undisturbed(seconds[1:]) for nodes, seconds in times.items()})
    largest = min(most, room)
    if _flat(clock, cost) and pool.reserve(table, largest) is not None:
        one, many = (_undisturbed(clock.prompts(n)) for n in (1, largest))
        cost.reading = Reading(max(many - one, 1e-3 * one) / largest, flat=one)
    far = min(FAR, room + CACHED - PIECE)
    if reading and far > 2 * CACHED and pool.reserve(table, far + PIECE - CACHED) is not None:
        clock.fill(far)
        cost.reading = _measure_reading(cost.reading, clock, far)
    table.positions = []
    pool.close(table)
    return cost


def _flat(clock: _Clock, cost: Cost) -> bool:
    """Whether a piece of a prompt costs next to nothing beside what any pass costs."""
    (first, one), *_, (last, many) = cost.knots.items()
    if many > 2 * FLAT * one:  # as on all processors
        return False
    return _undisturbed(clock.prompts(last)) < FLAT * _undisturbed(clock.prompts(first))


def _undisturbed(seconds: list[float]) -> float:
    """What of several takes least, but for one: others on the machine only ever make it longer."""
    return sorted(seconds)[min(1, len(seconds) - 1)]


def _measure_reading(reading: Reading, clock: _Clock, far: int) -> Reading:
    """What a node and a piece of a prompt cost more behind many entries than behind few."""
    lengths, sizes = (CACHED, far), (1, PIECE)
    times: dict[tuple[int, int], list[float]] = {(n, at): [] for n in sizes for at in lengths}
    for _ in range(ROUNDS):
        for nodes, cached in times:
            clock.table.positions = list(range(cached))
            times[nodes, cached].append(clock.run(nodes, prompt=True))
    one, piece = (
        (min(times[nodes, far]) - min(times[nodes, CACHED])) / (far - CACHED) for nodes in sizes
    )
    least = 1e-6 * reading.node  # what is nothing could never be corrected
    look = max((piece - one) / (PIECE - 1), least)
    return Reading(reading.node, look, max(one - look, least), flat=reading.flat)


class _Clock:
    """Times passes over one table."""

    def __init__(self, model: Model, pool: PagePool, table: Table) -> None:
        self._model, self._pool, self.table = model, pool, table
        self._numbers = np.random.default_rng(0)

    def fill(self, entries: int) -> None:
        """Copies the entries that were read behind themselves, until there are so many.

        What they hold has no part in how long a pass takes, but memory that was never written has: a
        system lends one and the same page for all of it, and that is not fetched from far away.
        """
        behind = self._pool.slots(self.table, entries - len(self.table))
        kept = self.table.positions
        self.table.positions = []
        read = self._pool.slots(self.table, len(kept))
        self.table.positions = kept
        self._model.move(np.resize(read, len(behind)), behind)

    def prompts(self, nodes: int) -> list[float]:
        """Seconds of passes over a piece of a prompt, without the first two: a card records these."""
        return [self.run(nodes, prompt=True) for _ in range(ROUNDS + 2)][2:]

    def run(self, nodes: int, *, prompt: bool = False) -> float:
        """Seconds of a pass over a tree, or over a piece of a prompt."""
        table, wants = self.table, Wants(best=CANDIDATES)
        tokens = self._numbers.integers(0, self._model.vocab_size, nodes)
        graph = chain(tokens if prompt else tokens[:1], len(table))
        if prompt:
            wants = Wants(nodes=())
        elif nodes > 1:  # two branches at each node, as drafts have them
            graph = graph.grow(tree(tokens[1:], np.arange(nodes - 1) // 2 - 1, len(table) + 1))
        proposal = Proposal(graph, len(graph) if prompt else 1, wants=wants)
        work = Work(proposal, table, self._pool.slots(table, nodes))
        start = time.perf_counter()
        self._model.forward([work]).wait()
        return time.perf_counter() - start
