"""The clock: medians, spreads, and cases in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from outstride.bench import clock


def test_median_and_spread() -> None:
    series = clock.Series([4.0, 1.0, 2.0, 3.0, 100.0])
    assert series.median == 3.0
    assert series.best == 1.0
    assert series.spread == 2.0
    assert series.to_dict() == {"median": 3.0, "spread": 2.0, "best": 1.0}


def test_one_duration_has_no_spread() -> None:
    assert clock.Series([2.0]).spread == 0.0


def test_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([3.0, 5.5])
    monkeypatch.setattr(clock, "now", lambda: next(times))
    assert clock.timed(lambda: None) == 2.5


def test_mean() -> None:
    assert clock.mean([1, 2, 6]) == 3
    assert clock.mean([]) == 0


def test_cases_run_in_turns_and_warm_ups_are_not_counted() -> None:
    log: list[str] = []

    def case(name: str) -> Callable[[], AbstractContextManager[Callable[[], object]]]:
        @contextmanager
        def run() -> Iterator[Callable[[], object]]:
            log.append(f"prepare {name}")
            yield lambda: log.append(name)
            log.append(f"tidy {name}")

        return run

    ticks: list[int] = []
    found = clock.in_turns(
        {"a": case("a"), "b": case("b")}, repeat=2, warmups=1, tick=lambda: ticks.append(1)
    )
    assert [len(series.seconds) for series in found.values()] == [2, 2]
    assert [line for line in log if len(line) == 1] == ["a", "b"] * 3
    assert log[:3] == ["prepare a", "a", "tidy a"]
    assert len(ticks) == 6


def test_no_time_runs_backwards() -> None:
    assert clock.now() <= clock.now()
    with pytest.raises(ValueError, match=r"min|empty"):
        _ = clock.Series().best
