"""What one pass of the target costs: against nodes, against cached length, against sequences.

This curve decides how much speculation can pay: a draft is worth its nodes only as long as a pass
over them costs little more than a pass over one. The passes here are the engine's own kind: tables
and slots come from the pool, entries are made by real passes, and the head sees every drafted node.
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
from outstride.bench.harness import Watch
from outstride.core.contracts import Work
from outstride.core.graph import chain
from outstride.core.proposal import TARGET, Proposal, Wants
from outstride.core.sequence import Table
from outstride.engine.passes import Passes
from outstride.errors import InvalidParams, OutOfMemory

NODES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (0, 128, 512, 1024, 2048)
SEQUENCES = (1, 4, 16)
CACHED = 128
CHUNK = 256
"""How many tokens a pass reads while the cache is being filled."""


@dataclass(frozen=True, slots=True)
class StepCase:
    """One kind of pass: so many nodes for each of so many sequences behind so many entries."""

    sweep: str
    """Which table it belongs to: nodes, cached or sequences."""
    nodes: int
    cached: int
    sequences: int = 1

    @property
    def value(self) -> int:
        """What varies within its sweep."""
        return int(getattr(self, self.sweep))


@dataclass(slots=True)
class StepReport:
    """Durations by case; cases that the model or its cache has no room for, with the reason."""

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
        """Milliseconds (medians) by sweep and what varies in it."""
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


class Bed:
    """Tables with real entries in them, and passes over them."""

    def __init__(self, passes: Passes, seed: int, watch: Watch) -> None:
        self._passes = passes
        self._model = passes.models[TARGET]
        self._pool = passes.pools[TARGET]
        self._random = np.random.default_rng(seed)
        self._watch = watch
        self._all: list[Table] = []
        self._single: dict[int, Table] = {}
        self._crowds: dict[int, list[Table]] = {}

    # --- making entries ---------------------------------------------------------------------------

    def prepare(self, wanted: Sequence[StepCase]) -> None:
        """Tables for all cases, as far as there is room.

        Single tables of several lengths are cut from one long one. Sequences that share a pass have
        entries of their own, as strangers' requests do.
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
                self._crowds[case.cached] = opened

    def tables(self, case: StepCase) -> list[Table] | None:
        """The tables of a case, if it has any."""
        if case.sequences == 1:
            single = self._single.get(case.cached)
            return None if single is None else [single]
        crowd = self._crowds.get(case.cached, [])
        return crowd[: case.sequences] if len(crowd) >= case.sequences else None

    def _open(self, count: int, entries: int) -> list[Table] | None:
        if count * (self._pool.pages_for(entries) + 1) > self._pool.available:
            return None
        tables = [Table() for _ in range(count)]
        self._all += tables
        chunk = max(1, CHUNK // count)
        self._watch.expected += -(-entries // chunk)
        while (left := entries - len(tables[0])) > 0:
            self._grow(tables, min(left, chunk))
            self._watch.tick()
        return tables

    def _grow(self, tables: Sequence[Table], nodes: int) -> None:
        """Reads random tokens and keeps their entries."""
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
        """Why a case cannot be run, if it cannot."""
        if case.cached + case.nodes > self._model.context:
            return f"the model's context holds {self._model.context}"
        pages = case.sequences * (self._pool.pages_for(case.nodes) + 1)  # one may be copied
        if self.tables(case) is None or pages > self._pool.available:
            return "the cache has too few pages"
        return None

    def _work(self, tables: Sequence[Table], nodes: int, given: int, wants: Wants) -> list[Work]:
        found = []
        for table in tables:
            moves = self._pool.reserve(table, nodes)
            if moves is None:
                raise OutOfMemory(f"the cache has no room for {nodes} more entries")
            self._passes.move(TARGET, moves)
            tokens = self._random.integers(self._model.vocab_size, size=nodes)
            proposal = Proposal(chain(tokens, len(table)), given=given, wants=wants)
            found.append(Work(proposal, table, self._pool.slots(table, nodes)))
        return found

    @contextmanager
    def once(self, case: StepCase) -> Iterator[Callable[[], object]]:
        """One pass to be timed; its entries are dropped again."""
        work = self._work(self.tables(case) or (), case.nodes, 1, Wants())
        yield lambda: self._model.forward(work).wait()
        for item in work:
            self._pool.commit(item.table, item.proposal.graph.positions, ())


def measure(
    passes: Passes,
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
    if passes.visions[TARGET].block is not None:
        raise InvalidParams("bench step times chains, which only causal models read")
    watch = Watch(progress)
    watch.expected = len(wanted) * (repeat + warmups)
    bed = Bed(passes, seed, watch)
    try:
        context = passes.models[TARGET].context
        bed.prepare([case for case in wanted if case.cached + case.nodes <= context])
        skipped = {case: reason for case in wanted if (reason := bed.obstacle(case)) is not None}
        report.skipped |= skipped
        watch.expected -= len(skipped) * (repeat + warmups)
        runs = {case: partial(bed.once, case) for case in wanted if case not in skipped}
        clock.in_turns(runs, repeat=repeat, warmups=warmups, tick=watch.tick, into=report.series)
    finally:
        bed.close()
    return report
