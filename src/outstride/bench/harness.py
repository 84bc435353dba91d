"""The one harness: whatever is measured, what was found is kept as it comes.

A report grows while its run goes on and can be summed up at any moment. Between two measurements the
harness writes it to the result file every few seconds, marked as not complete; Ctrl-C, a kill or an
error ends the run and leaves what was measured until then.
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
"""Seconds between two writings of a result that still grows, at the least."""
SHARE = 0.02
"""The most that writing may take of the time of a run."""

Progress = Callable[[int, int], None]
"""Called with how much of how much is done, between two measurements."""


class Report(Protocol):
    """What a run fills in. Both can be asked for at any moment, with little or nothing in it."""

    def samples(self) -> list[dict[str, Any]]: ...

    def summary(self) -> dict[str, Any]: ...


class Watch:
    """Counts measurements, done and still expected, for whoever shows progress."""

    def __init__(self, show: Progress | None) -> None:
        self._show = show
        self._done = 0
        self.expected = 0

    def tick(self) -> None:
        self._done += 1
        if self._show is not None:
            self._show(self._done, max(self._done, self.expected))


class Growing:
    """A result whose report still grows, and the file that follows it."""

    def __init__(self, result: BenchResult, report: Report, path: str | Path | None) -> None:
        self._result, self._report, self._path = result, report, path
        self._next = clock.now() + EVERY

    def tick(self) -> None:
        """Writes if it is time to; never while something is being timed."""
        start = clock.now()
        if self._path is None or start < self._next:
            return
        self._result.enter(self._report.samples(), self._report.summary())
        results.write(self._result, self._path)
        end = clock.now()
        self._next = end + max(EVERY, (end - start) / SHARE)

    def end(self, *, complete: bool) -> None:
        """Enters what there is and writes it."""
        samples, summary = self._report.samples(), self._report.summary()
        if complete:
            self._result.finish(samples, summary)
        else:
            self._result.enter(samples, summary)
        if self._path is not None and (complete or samples):
            results.write(self._result, self._path)


@contextmanager
def terminable() -> Iterator[None]:
    """A polite kill ends a run as Ctrl-C does."""
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
    """Runs a measurement that fills `report`; whether it came to its end.

    An interrupted run is no error: its result is there, and says that it is not complete. A run that
    fails leaves what it had in the file and raises.
    """
    growing = Growing(result, report, path)

    def tick(done: int, total: int) -> None:
        if progress is not None:
            progress(done, total)
        growing.tick()

    with terminable():
        try:
            run(tick)
        except KeyboardInterrupt:
            growing.end(complete=False)
            return False
        except BaseException:
            growing.end(complete=False)
            raise
    growing.end(complete=True)
    return True
