"""The clock of all benchmarks: how durations are measured and summarized.

A figure is the median of several runs after warm-ups. Cases that are compared run in turns: a
machine that is slow for a second then slows all cases, not one of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any, TypeVar

K = TypeVar("K", bound=Hashable)

Case = Callable[[], AbstractContextManager[Callable[[], object]]]
"""Prepares a run on entry, yields the call to time, and cleans up on exit."""

now = time.perf_counter


@dataclass(slots=True)
class Series:
    """Durations of one case, in seconds."""

    seconds: list[float] = field(default_factory=list)

    def add(self, seconds: float) -> None:
        self.seconds.append(seconds)

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def spread(self) -> float:
        """Interquartile range of the durations; if it is small, the median can be trusted."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = quantiles(self.seconds, n=4, method="inclusive")
        return high - low

    def to_dict(self) -> dict[str, Any]:
        found = {"median": self.median, "spread": self.spread, "best": self.best}
        return {name: round(seconds, 7) for name, seconds in found.items()}


def timed(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = now()
    call()
    return now() - start


def in_turns(
    cases: Mapping[K, Case],
    *,
    repeat: int,
    warmups: int = 1,
    tick: Callable[[], None] | None = None,
    into: dict[K, Series] | None = None,
) -> dict[K, Series]:
    """Runs all cases in turns; warm-ups (compilation, caches, page faults) are not counted.

    `into` is filled as durations are measured, so that an interrupted run keeps them.
    """
    found = {} if into is None else into
    found |= {name: Series() for name in cases}
    for turn in range(warmups + repeat):
        for name, case in cases.items():
            with case() as call:
                seconds = timed(call)
            if turn >= warmups:
                found[name].add(seconds)
            if tick is not None:
                tick()
    return found


def mean(values: Iterable[float]) -> float:
    """The arithmetic mean, 0 for no values."""
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0
