"""What a step costs against the number of nodes in its pass: measured at first, corrected on line."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Mapping
from statistics import median

import numpy as np

from outstride.cache.pool import PagePool
from outstride.core.contracts import Model, Work
from outstride.core.graph import chain, tree
from outstride.core.proposal import Proposal, Wants
from outstride.core.sequence import Table

KNOTS = (1, 2, 4, 8, 16, 32, 64)
CACHED = 128
ROUNDS = 5
CANDIDATES = 8


class Cost:
    """Seconds of a step, straight lines between knots, the last line going on for ever.

    Two corrections are made after each step. The machine as a whole may be faster or slower now than
    it was, which a quick average follows; single knots may lie wrong beside the others, which is put
    right slowly. A curve that was given, not measured, stays as it is.
    """

    QUICK, SLOW = 0.2, 0.1

    def __init__(self, seconds: Mapping[int, float], *, frozen: bool = False) -> None:
        if not seconds or min(seconds) < 1 or min(seconds.values()) <= 0:
            raise ValueError("a cost curve needs positive seconds for numbers of nodes from 1 on")
        self._knots = sorted(seconds)
        self._values = _rising([float(seconds[n]) for n in self._knots])
        self._frozen = frozen
        self._curve: list[float] = []
        self.reading = (self._values[-1] - self._values[0]) / max(
            self._knots[-1] - self._knots[0], 1
        )
        """Seconds for each node that reads a prompt beside others that talk, as of late."""
        self.reading = max(self.reading, 0.01 * self._values[0])

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

    def observe(self, nodes: int, seconds: float, read: int = 0) -> None:
        """Enters what a step took; one step says little, for something else may have held it up.

        If `read` of its nodes only read a prompt, what they cost is told apart: the longer the
        prompt, the more it costs to read on, which is no fault of the curve.
        """
        if self._frozen or nodes < 1 or seconds <= 0.0:
            return
        ratio = min(max(seconds / self.curve(nodes)[nodes], 0.5), 2.0)
        if read:
            if read < nodes:
                each = max(seconds - self.curve(nodes)[nodes - read], 0.0) / read
                each = min(max(each, 0.5 * self.reading), 2.0 * self.reading)
                self.reading += self.QUICK * (each - self.reading)
            return
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
    """Times real passes over trees behind some entries, in turns; None while there is no room."""
    knots = [n for n in KNOTS if n <= max(most, 1)]
    room = min(pool.available * pool.page_size, model.context) - CACHED
    knots = [n for n in knots if n <= room]
    table = Table()
    if not knots or pool.reserve(table, CACHED + knots[-1]) is None:
        return None
    numbers = np.random.default_rng(0)
    times: dict[int, list[float]] = {nodes: [] for nodes in knots}

    def run(nodes: int) -> float:
        tokens = numbers.integers(0, model.vocab_size, nodes)
        graph = chain(tokens[:1], len(table))
        if nodes > 1:  # two branches at each node, as drafts have them
            graph = graph.grow(tree(tokens[1:], np.arange(nodes - 1) // 2 - 1, len(table) + 1))
        proposal = Proposal(graph, 1, wants=Wants(best=CANDIDATES))
        work = Work(proposal, table, pool.slots(table, nodes))
        start = time.perf_counter()
        model.forward([work]).wait()
        return time.perf_counter() - start

    run(CACHED)
    table.positions = list(range(CACHED))
    for _ in range(ROUNDS):
        for nodes in knots:
            times[nodes].append(run(nodes))
    table.positions = []
    pool.close(table)
    return Cost({nodes: median(seconds) for nodes, seconds in times.items()})
