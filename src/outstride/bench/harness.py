"""The harness of all benchmarks: results are kept as they are measured.

A report grows during its run and can be summarized at any time. Between two measurements the harness
writes it to the result file every few seconds, marked as not complete. Ctrl-C, SIGTERM or an error
ends the run and leaves what was measured until then.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from outstride.bench import clock
from outstride.bench import result as results
from outstride.bench.result import BenchResult

EVERY = 2.0
"""Smallest number of seconds between two writes of an incomplete result."""
SHARE = 0.02
"""Largest share of a run's time that writing may take."""

Progress = Callable[[int, int], None]
"""Called between two measurements with the numbers done and expected."""


class Report(Protocol):
    """What a run fills. Both methods work at any time, also with an empty report."""

    def samples(self) -> list[dict[str, Any]]: ...

    def summary(self) -> dict[str, Any]: ...


class ProgressCounter:
    """Counts measurements, done and still expected, for the progress display."""

    def __init__(self, show: Progress | None) -> None:
        self._show = show
        self._done = 0
        self.expected = 0

    def advance(self) -> None:
        self._done += 1
        if self._show is not None:
            self._show(self._done, max(self._done, self.expected))


class IncrementalResult:
    """A result whose report is still growing, and the file that it is written to."""

    def __init__(self, result: BenchResult, report: Report, path: str | Path | None) -> None:
        self._result, self._report, self._path = result, report, path
        self._next = clock.now() + EVERY

    def write_if_due(self) -> None:
        """Writes the file if it is due. Never called while something is being timed."""
        start = clock.now()
        if self._path is None or start < self._next:
            return
        self._result.enter(self._report.samples(), self._report.summary())
        results.write(self._result, self._path)
        end = clock.now()
        self._next = end + max(EVERY, (end - start) / SHARE)

    def finish(self, *, complete: bool) -> None:
        """Fills in what was measured and writes the file."""
        samples, summary = self._report.samples(), self._report.summary()
        if complete:
            self._result.finish(samples, summary)
        else:
            self._result.enter(samples, summary)
        if self._path is not None and (complete or samples):
            results.write(self._result, self._path)


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def record(
    result: BenchResult,
    report: Report,
    run: Callable[[Progress], object],
    *,
    path: str | Path | None = None,
    progress: Progress | None = None,
) -> bool:
    """Runs a measurement that fills `report`; returns whether it ran to its end.

    An interrupted run is no error: its result is kept and marked as incomplete. A run that fails
    leaves what it had in the file and raises.
    """
    growing = IncrementalResult(result, report, path)

    def tick(done: int, total: int) -> None:
        if progress is not None:
            progress(done, total)
        growing.write_if_due()

    with terminable():
        try:
            run(tick)
        except KeyboardInterrupt:
            growing.finish(complete=False)
            return False
        except BaseException:
            growing.finish(complete=False)
            raise
    growing.finish(complete=True)
    return True
