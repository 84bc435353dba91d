"""What a step costs against the number of nodes in its pass: measured at first, corrected on line."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Mapping

import numpy as np

from outstride.cache.pool import PagePool
from outstride.core.contracts import Model, Work
from outstride.core.graph import chain
from outstride.core.proposal import Proposal
from outstride.core.sequence import Table

KNOTS = (1, 2, 4, 8, 16, 32, 64)
CACHED = 32
ROUNDS = 3


class Cost:
    """Seconds of a step, straight lines between knots, the last line going on for ever.

    Two corrections are made after each step. The machine as a whole may be faster or slower now than
    it was, which a quick average follows; single knots may lie wrong beside the others, which is put
    right slowly. A curve that was given, not measured, stays as it is.
    """

    QUICK, SLOW = 0.2, 0.05

    def __init__(self, seconds: Mapping[int, float], *, frozen: bool = False) -> None:
        if not seconds or min(seconds) < 1 or min(seconds.values()) <= 0:
            raise ValueError("a cost curve needs positive seconds for numbers of nodes from 1 on")
        self._knots = sorted(seconds)
        self._values = _rising([float(seconds[n]) for n in self._knots])
        self._frozen = frozen
        self._curve: list[float] = []

    @property
    def knots(self) -> dict[int, float]:
        """The curve as it stands."""
        return dict(zip(self._knots, self._values, strict=True))

    def curve(self, nodes: int) -> list[float]:
        """Seconds for 0 to `nodes` nodes; more nodes never cost less."""
        if len(self._curve) <= nodes:
            wanted = np.arange(max(nodes, 1) + 1)
            knots, values = np.asarray(self._knots), np.asarray(self._values)
            found = np.interp(wanted, knots, values)
            if len(knots) > 1:
                slope = (values[-1] - values[-2]) / (knots[-1] - knots[-2])
                beyond = np.maximum(wanted - knots[-1], 0)
                found = found + beyond * max(float(slope), 0.0)
            self._curve = found.tolist()
        return self._curve

    def observe(self, nodes: int, seconds: float) -> None:
        """Enters what a step took; one step says little, for something else may have held it up."""
        if self._frozen or nodes < 1 or seconds <= 0.0:
            return
        ratio = min(max(seconds / self.curve(nodes)[nodes], 0.5), 2.0)
        self._values = [value * ratio**self.QUICK for value in self._values]
        right = min(bisect_right(self._knots, nodes), len(self._knots) - 1)
        left = max(right - 1, 0)
        width = max(self._knots[right] - self._knots[left], 1)
        near = min(max((nodes - self._knots[left]) / width, 0.0), 1.0)
        self._values[left] *= ratio ** (self.SLOW * (1.0 - near))
        self._values[right] *= ratio ** (self.SLOW * near)
        self._values = _rising(self._values)
        self._curve = []


def _rising(values: list[float]) -> list[float]:
    """The nearest values that never fall: neighbours in the wrong order become their mean."""
    groups: list[tuple[float, int]] = []
    for value in values:
        total, count = value, 1
        while groups and groups[-1][0] / groups[-1][1] > total / count:
            more, members = groups.pop()
            total, count = total + more, count + members
        groups.append((total, count))
    return [total / count for total, count in groups for _ in range(count)]


def measure(model: Model, pool: PagePool, most: int) -> Cost | None:
    """Times real passes over chains behind a few entries, in turns; None while there is no room."""
    knots = [n for n in KNOTS if n <= max(most, 1)]
    room = min(pool.available * pool.page_size, model.context) - CACHED
    knots = [n for n in knots if n <= room]
    table = Table()
    if not knots or pool.reserve(table, CACHED + knots[-1]) is None:
        return None
    numbers = np.random.default_rng(0)
    best: dict[int, float] = {}

    def run(nodes: int) -> float:
        tokens = numbers.integers(0, model.vocab_size, nodes)
        graph = chain(tokens, len(table))
        work = Work(Proposal(graph, 1), table, pool.slots(table, nodes))
        start = time.perf_counter()
        model.forward([work]).wait()
        return time.perf_counter() - start

    run(CACHED)
    table.positions = list(range(CACHED))
    for _ in range(ROUNDS):
        for nodes in knots:
            seconds = run(nodes)
            best[nodes] = min(seconds, best.get(nodes, seconds))
    table.positions = []
    pool.close(table)
    return Cost(best)
