"""What one pass of the target costs: against nodes, against cached length, against sequences.

This curve decides how much speculation can pay: a draft is worth its nodes only as long as a pass
over them costs little more than a pass over one. The passes here are the engine's own kind: tables
and slots come from the pool, entries are made by real passes, and the head sees every drafted node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from outstride.bench import clock
from outstride.bench.clock import Series
from outstride.core.contracts import Work
from outstride.core.graph import chain
from outstride.core.proposal import TARGET, Proposal, Wants
from outstride.core.sequence import Table
from outstride.engine.passes import Passes
from outstride.errors import InvalidParams

NODES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (0, 128, 512, 1024, 2048)
SEQUENCES = (1, 4, 16)
CACHED = 128
CHUNK = 256
"""How many tokens a pass reads while the cache is being filled."""
_FULL = "the cache has too few pages"


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

    series: dict[StepCase, Series]
    skipped: dict[StepCase, str]

    def samples(self) -> list[dict[str, Any]]:
        return [
            {
                "sweep": case.sweep,
                "nodes": case.nodes,
                "cached": case.cached,
                "sequences": case.sequences,
                "seconds": series.seconds,
                **series.to_dict(),
            }
            for case, series in self.series.items()
        ]

    def summary(self) -> dict[str, Any]:
        """Milliseconds (medians) by sweep and what varies in it."""
        found: dict[str, Any] = {"milliseconds": {}}
        for case, series in self.series.items():
            sweep = found["milliseconds"].setdefault(case.sweep, {})
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


class _Bed:
    """Tables with real entries in them, and passes over them."""

    def __init__(self, passes: Passes, seed: int) -> None:
        self._passes = passes
        self._model = passes.models[TARGET]
        self._pool = passes.pools[TARGET]
        self._random = np.random.default_rng(seed)
        self._tables: list[Table] = []

    def room(self, case: StepCase) -> str | None:
        """Why a case cannot be run, if it cannot."""
        if case.cached + case.nodes > self._model.context:
            return f"the model's context holds {self._model.context}"
        return None

    def fits(self, case: StepCase) -> bool:
        """Whether there are pages for the nodes of a pass, a copied page for each table included."""
        return case.sequences * (self._pool.pages_for(case.nodes) + 1) <= self._pool.available

    def work(self, tables: Sequence[Table], nodes: int, given: int, wants: Wants) -> list[Work]:
        found = []
        for table in tables:
            moves = self._pool.reserve(table, nodes)
            if moves is None:
                raise InvalidParams("the cache has no room for this case")
            self._passes.move(TARGET, moves)
            tokens = self._random.integers(self._model.vocab_size, size=nodes)
            proposal = Proposal(chain(tokens, len(table)), given=given, wants=wants)
            found.append(Work(proposal, table, self._pool.slots(table, nodes)))
        return found

    def grow(self, tables: Sequence[Table], nodes: int) -> None:
        """Reads random tokens and keeps their entries."""
        work = self.work(tables, nodes, nodes, Wants(nodes=()))
        self._model.forward(work).wait()
        for item in work:
            positions = item.proposal.graph.positions
            self._passes.move(
                TARGET, self._pool.commit(item.table, positions, range(nodes))
            )

    def open(self, count: int, entries: int) -> list[Table] | None:
        """Tables with that many entries of their own; None if they do not fit."""
        if count * (self._pool.pages_for(entries) + 1) > self._pool.available:
            return None
        tables = [Table() for _ in range(count)]
        self._tables += tables
        while (left := entries - len(tables[0])) > 0:
            self.grow(tables, min(left, max(1, CHUNK // count)))
        return tables

    def fork(self, table: Table, entries: int) -> Table:
        """A shorter table over the entries of a longer one."""
        self._tables.append(self._pool.fork(table, entries))
        return self._tables[-1]

    def close(self) -> None:
        for table in self._tables:
            self._pool.close(table)
        self._tables.clear()

    @contextmanager
    def once(self, tables: Sequence[Table], nodes: int) -> Iterator[Callable[[], object]]:
        """One pass to be timed; its entries are dropped again."""
        work = self.work(tables, nodes, 1, Wants())
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
    progress: Callable[[int, int], None] | None = None,
) -> StepReport:
    """Times all cases in turns. The engine that owns `passes` must be idle."""
    if repeat < 1 or warmups < 0:
        raise InvalidParams("repeat must be at least 1")
    if passes.visions[TARGET].block is not None:
        raise InvalidParams("bench step times chains, which only causal models read")
    bed = _Bed(passes, seed)
    skipped: dict[StepCase, str] = {}
    runs: dict[StepCase, clock.Case] = {}
    try:
        single = [case for case in wanted if case.sequences == 1]
        fitting = []
        for case in single:
            if (reason := bed.room(case)) is not None:
                skipped[case] = reason
            else:
                fitting.append(case)
        tables: dict[int, Table] = {}
        for case in sorted(fitting, key=lambda c: -c.cached):
            if case.cached in tables:
                continue
            if tables:
                tables[case.cached] = bed.fork(next(iter(tables.values())), case.cached)
            elif (opened := bed.open(1, case.cached)) is not None:
                tables[case.cached] = opened[0]
        for case in wanted:
            if case in skipped:
                continue
            group = [tables[case.cached]] if case in single and case.cached in tables else None
            if case.sequences > 1:
                group = bed.open(case.sequences, case.cached) if not bed.room(case) else None
            if group is None:
                skipped[case] = bed.room(case) or _FULL
            else:
                runs[case] = lambda g=group, n=case.nodes: bed.once(g, n)  # type: ignore[misc]
        for case in [case for case in runs if not bed.fits(case)]:
            skipped[case] = _FULL
            del runs[case]
        total, done = len(runs) * (repeat + warmups), 0

        def tick() -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(done, total)

        series = clock.in_turns(runs, repeat=repeat, warmups=warmups, tick=tick)
    finally:
        bed.close()
    return StepReport(series, skipped)
