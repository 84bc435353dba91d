"""The cost of one pass of the target: by nodes, by cached length, by number of sequences.

This curve decides how much speculation can pay: a draft is worth its nodes only while a pass over
them costs little more than a pass over one node. The passes here are the engine's own kind: block
tables and slots come from the pool, the KV comes from real passes, and the LM head scores every
drafted node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from outstride.bench import clock
from outstride.bench.clock import Series
from outstride.bench.harness import ProgressCounter
from outstride.core.contracts import PassInput
from outstride.core.graph import chain
from outstride.core.proposal import TARGET, Proposal, Wants
from outstride.core.sequence import BlockTable
from outstride.engine.model_runner import ModelRunner
from outstride.errors import InvalidParams, OutOfMemory

NODES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (0, 128, 512, 1024, 2048)
SEQUENCES = (1, 4, 16)
CACHED = 128
CHUNK = 256
"""Tokens per pass while the KV cache is being filled."""


@dataclass(frozen=True, slots=True)
class StepCase:
    """One kind of pass: nodes per sequence, number of sequences, cached tokens before them."""

    sweep: str
    """The table that it belongs to: nodes, cached or sequences."""
    nodes: int
    cached: int
    sequences: int = 1

    @property
    def value(self) -> int:
        """The value that varies within its sweep."""
        return int(getattr(self, self.sweep))


@dataclass(slots=True)
class StepReport:
    """Durations by case; and cases that do not fit the context or the KV cache, with the reason."""

    series: dict[StepCase, Series] = field(default_factory=dict)
    skipped: dict[StepCase, str] = field(default_factory=dict)

    def samples(self) -> list[dict[str, Any]]:
        return [
            {
                "sweep": case.sweep,
                "nodes": case.nodes,
                "cached": case.cached,
                "sequences": case.sequences,
                "seconds": [round(seconds, 7) for seconds in series.seconds],
                **series.to_dict(),
            }
            for case, series in self.series.items()
            if series.seconds
        ]

    def summary(self) -> dict[str, Any]:
        """Median milliseconds by sweep and by the value that varies."""
        found: dict[str, Any] = {"milliseconds": {}}
        for case, series in self.series.items():
            sweep = found["milliseconds"].setdefault(case.sweep, {})
            if series.seconds:
                sweep[str(case.value)] = round(series.median * 1000, 4)
        found["skipped"] = [
            {"sweep": case.sweep, case.sweep: case.value, "reason": reason}
            for case, reason in self.skipped.items()
        ]
        return found


def cases(
    nodes: Sequence[int] = NODES,
    cached: int = CACHED,
    lengths: Sequence[int] = LENGTHS,
    sequences: Sequence[int] = SEQUENCES,
) -> list[StepCase]:
    """The cases of the three sweeps."""
    if cached < 0 or min(nodes, default=1) < 1 or min(lengths, default=0) < 0:
        raise InvalidParams("nodes must be at least 1, cached and lengths at least 0")
    return [
        *(StepCase("nodes", n, cached) for n in nodes),
        *(StepCase("cached", 1, length) for length in lengths),
        *(StepCase("sequences", 1, cached, count) for count in sequences),
    ]


class PassBench:
    """Block tables with real KV, and passes over them."""

    def __init__(self, passes: ModelRunner, seed: int, watch: ProgressCounter) -> None:
        self._passes = passes
        self._model = passes.models[TARGET]
        self._pool = passes.pools[TARGET]
        self._random = np.random.default_rng(seed)
        self._watch = watch
        self._all: list[BlockTable] = []
        self._single: dict[int, BlockTable] = {}
        self._batched: dict[int, list[BlockTable]] = {}

    # --- filling the KV cache ---------------------------------------------------------------------

    def prepare(self, wanted: Sequence[StepCase]) -> None:
        """Fills block tables for all cases, as far as there are pages.

        Single tables of several lengths are forked from one long table. Sequences that share a pass
        have KV of their own, as unrelated requests do.
        """
        for case in sorted(wanted, key=lambda c: -c.cached):
            if self.tables(case) is None and case.sequences == 1:
                if self._single:
                    longest = next(iter(self._single.values()))
                    self._all.append(self._pool.fork(longest, case.cached))
                    self._single[case.cached] = self._all[-1]
                elif (opened := self._open(1, case.cached)) is not None:
                    self._single[case.cached] = opened[0]
        for case in sorted(wanted, key=lambda c: -c.sequences):
            if (
                self.tables(case) is None
                and (opened := self._open(case.sequences, case.cached)) is not None
            ):
                self._batched[case.cached] = opened

    def tables(self, case: StepCase) -> list[BlockTable] | None:
        """The block tables of a case, or None."""
        if case.sequences == 1:
            single = self._single.get(case.cached)
            return None if single is None else [single]
        tables = self._batched.get(case.cached, [])
        return tables[: case.sequences] if len(tables) >= case.sequences else None

    def _open(self, count: int, entries: int) -> list[BlockTable] | None:
        if count * (self._pool.pages_for(entries) + 1) > self._pool.available:
            return None
        tables = [BlockTable() for _ in range(count)]
        self._all += tables
        chunk = max(1, CHUNK // count)
        self._watch.expected += -(-entries // chunk)
        while (left := entries - len(tables[0])) > 0:
            self._grow(tables, min(left, chunk))
            self._watch.advance()
        return tables

    def _grow(self, tables: Sequence[BlockTable], nodes: int) -> None:
        """Prefills random tokens and keeps their KV."""
        work = self._work(tables, nodes, nodes, Wants(nodes=()))
        self._model.forward(work).wait()
        for item in work:
            positions = item.proposal.graph.positions
            self._passes.move(TARGET, self._pool.commit(item.table, positions, range(nodes)))

    def close(self) -> None:
        for table in self._all:
            self._pool.close(table)

    # --- passes -----------------------------------------------------------------------------------

    def obstacle(self, case: StepCase) -> str | None:
        """Why a case cannot run, or None."""
        if case.cached + case.nodes > self._model.context:
            return f"the model's context holds {self._model.context}"
        pages = case.sequences * (self._pool.pages_for(case.nodes) + 1)  # one may be copied
        if self.tables(case) is None or pages > self._pool.available:
            return "the KV cache has too few pages"
        return None

    def _work(
        self, tables: Sequence[BlockTable], nodes: int, given: int, wants: Wants
    ) -> list[PassInput]:
        found = []
        for table in tables:
            moves = self._pool.reserve(table, nodes)
            if moves is None:
                raise OutOfMemory(f"the KV cache has too few pages for {nodes} more tokens")
            self._passes.move(TARGET, moves)
            tokens = self._random.integers(self._model.vocab_size, size=nodes)
            proposal = Proposal(chain(tokens, len(table)), given=given, wants=wants)
            found.append(PassInput(proposal, table, self._pool.slots(table, nodes)))
        return found

    @contextmanager
    def once(self, case: StepCase) -> Iterator[Callable[[], object]]:
        """One pass to time; its KV is dropped again."""
        work = self._work(self.tables(case) or (), case.nodes, 1, Wants())
        yield lambda: self._model.forward(work).wait()
        for item in work:
            self._pool.commit(item.table, item.proposal.graph.positions, ())


def measure(
    passes: ModelRunner,
    wanted: Sequence[StepCase],
    *,
    repeat: int = 7,
    warmups: int = 1,
    seed: int = 0,
    report: StepReport | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> StepReport:
    """Times all cases in turns and fills a report. The engine that owns `passes` must be idle."""
    report = StepReport() if report is None else report
    if repeat < 1 or warmups < 0:
        raise InvalidParams("repeat must be at least 1")
    if passes.patterns[TARGET].block is not None:
        raise InvalidParams("bench step times chains of nodes, which need a causal model")
    watch = ProgressCounter(progress)
    watch.expected = len(wanted) * (repeat + warmups)
    bed = PassBench(passes, seed, watch)
    try:
        context = passes.models[TARGET].context
        bed.prepare([case for case in wanted if case.cached + case.nodes <= context])
        skipped = {case: reason for case in wanted if (reason := bed.obstacle(case)) is not None}
        report.skipped |= skipped
        watch.expected -= len(skipped) * (repeat + warmups)
        runs = {case: partial(bed.once, case) for case in wanted if case not in skipped}
        clock.in_turns(runs, repeat=repeat, warmups=warmups, tick=watch.advance, into=report.series)
    finally:
        bed.close()
    return report
