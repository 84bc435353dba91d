"""Times passes of an idle engine: a cost curve over nodes, and what prefill chunks cost.

This is done where no prior is known, which is on GPUs, and for the speed-up that training expects of a
draft head. On CPUs the cost is learned from the passes that answers make.
"""

from __future__ import annotations

import time

import numpy as np

from outstride.cache.pool import PagePool
from outstride.core.contracts import Model, PassInput
from outstride.core.graph import chain, tree
from outstride.core.proposal import Proposal, Wants
from outstride.core.sequence import BlockTable
from outstride.policy.config import DEFAULT_CONFIG, AutoConfig
from outstride.policy.cost_model import CostModel, PrefillCost
from outstride.policy.cost_prior import SIZES


def measure(
    model: Model,
    pool: PagePool,
    max_nodes: int,
    *,
    long_prefill: bool = False,
    config: AutoConfig = DEFAULT_CONFIG,
) -> CostModel | None:
    """Times real passes over trees after some cached tokens; None if the cache has no room for it.

    long_prefill: also times prefill chunks late in a long prompt, for a server with many requests.
    """
    context = config.profiling_context
    knots = [n for n in SIZES if n <= max(max_nodes, 1)]
    capacity = min(pool.available * pool.page_size, model.context) - context
    knots = [n for n in knots if n <= capacity]
    table = BlockTable()
    if not knots or pool.reserve(table, context + knots[-1]) is None:
        return None
    timer = _PassTimer(model, pool, table, config)
    rounds = config.profiling_rounds
    times: dict[int, list[float]] = {nodes: [] for nodes in knots}
    timer.run(context)
    table.positions = list(range(context))
    for nodes in reversed(knots):
        # Sizes come one after the other: the first pass of a size finds caches filled by another.
        for number in range(rounds + 1):
            if number < rounds - 1 or nodes < config.few_rounds_from:
                times[nodes].append(timer.run(nodes))
    curve = {nodes: _undisturbed(seconds[1:]) for nodes, seconds in times.items()}
    cost = CostModel(curve, config=config)
    largest = min(max_nodes, capacity)
    if _flat(timer, cost, config) and pool.reserve(table, largest) is not None:
        one, many = (_undisturbed(timer.prefill(n)) for n in (1, largest))
        per_node = max(many - one, 1e-3 * one) / largest
        cost.prefill = PrefillCost(per_node, flat=one, config=config)
    chunk = config.long_context_chunk
    far = min(config.long_context, capacity + context - chunk)
    if (
        long_prefill
        and far > 2 * context
        and pool.reserve(table, far + chunk - context) is not None
    ):
        timer.fill(far)
        cost.prefill = _measure_prefill(cost.prefill, timer, far, config)
    table.positions = []
    pool.close(table)
    return cost


def _flat(timer: _PassTimer, cost: CostModel, config: AutoConfig) -> bool:
    """Whether a prefill chunk costs next to nothing against what any pass costs."""
    (first, one), *_, (last, many) = cost.knots.items()
    if many > 2 * config.flat_factor * one:  # as on all CPUs
        return False
    few, chunk = (_undisturbed(timer.prefill(nodes)) for nodes in (first, last))
    return chunk < config.flat_factor * few


def _undisturbed(seconds: list[float]) -> float:
    """The second smallest: other work on the machine only ever adds to a time."""
    return sorted(seconds)[min(1, len(seconds) - 1)]


def _measure_prefill(
    prefill: PrefillCost, timer: _PassTimer, far: int, config: AutoConfig
) -> PrefillCost:
    """What a node and a chunk cost more after many cached tokens than after few."""
    near, chunk = config.profiling_context, config.long_context_chunk
    times: dict[tuple[int, int], list[float]] = {
        (nodes, cached): [] for nodes in (1, chunk) for cached in (near, far)
    }
    for _ in range(config.profiling_rounds):
        for nodes, cached in times:
            timer.table.positions = list(range(cached))
            times[nodes, cached].append(timer.run(nodes, prefill=True))
    one, many = (
        (min(times[nodes, far]) - min(times[nodes, near])) / (far - near) for nodes in (1, chunk)
    )
    floor = 1e-6 * prefill.per_node  # a term of zero could never be corrected
    per_pair = max((many - one) / (chunk - 1), floor)
    return PrefillCost(
        prefill.per_node, per_pair, max(one - per_pair, floor), flat=prefill.flat, config=config
    )


class _PassTimer:
    """Times passes over one block table."""

    def __init__(self, model: Model, pool: PagePool, table: BlockTable, config: AutoConfig) -> None:
        self._model, self._pool, self.table = model, pool, table
        self._config = config
        self._rng = np.random.default_rng(0)

    def fill(self, tokens: int) -> None:
        """Copies the cached KV after itself until there are `tokens` tokens of it.

        The values do not matter for how long a pass takes, but memory that was never written does: the
        operating system maps one and the same page for all of it, which is always in a CPU cache.
        """
        after = self._pool.slots(self.table, tokens - len(self.table))
        kept = self.table.positions
        self.table.positions = []
        cached = self._pool.slots(self.table, len(kept))
        self.table.positions = kept
        self._model.move(np.resize(cached, len(after)), after)

    def prefill(self, nodes: int) -> list[float]:
        """Seconds of prefill chunks, without the first two, in which a GPU captures CUDA graphs."""
        rounds = self._config.profiling_rounds
        return [self.run(nodes, prefill=True) for _ in range(rounds + 2)][2:]

    def run(self, nodes: int, *, prefill: bool = False) -> float:
        """Seconds of a pass over a tree, or over a prefill chunk."""
        table, wants = self.table, Wants(best=self._config.profiling_candidates)
        tokens = self._rng.integers(0, self._model.vocab_size, nodes)
        graph = chain(tokens if prefill else tokens[:1], len(table))
        if prefill:
            wants = Wants(nodes=())
        elif nodes > 1:  # two branches at each node, as drafts have them
            graph = graph.grow(tree(tokens[1:], np.arange(nodes - 1) // 2 - 1, len(table) + 1))
        proposal = Proposal(graph, len(graph) if prefill else 1, wants=wants)
        work = PassInput(proposal, table, self._pool.slots(table, nodes))
        start = time.perf_counter()
        self._model.forward([work]).wait()
        return time.perf_counter() - start
