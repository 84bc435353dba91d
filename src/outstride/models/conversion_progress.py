"""Progress of a conversion on standard error: a bar on a terminal, lines elsewhere if it takes long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread

_INTERVAL = 2.0
"""Seconds before the first line, and between lines, where there is no terminal."""


@contextmanager
def conversion_progress(
    name: str, total: int, doing: str = "Converting", when: str = " (first start only)"
) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with numbers of weights that are done, from any thread.

    Lines appear also while nothing is counted, such as when files are compared or written.
    """
    from rich.console import Console
    from rich.progress import Progress

    console, lock, label = Console(stderr=True), Lock(), f"{doing} {name}"
    done, over = 0, Event()

    def report() -> None:
        while not over.wait(_INTERVAL):
            share = min(done / max(total, 1), 1)
            print(f"{label}{when}: {share:.0%}", file=sys.stderr, flush=True)

    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=total)

        def advance(count: int) -> None:
            nonlocal done
            with lock:
                done += count
                bar.update(task, completed=done)

        reporter = None if console.is_terminal else Thread(target=report, daemon=True)
        if reporter is not None:
            reporter.start()
        try:
            yield advance
        finally:
            over.set()
            if reporter is not None:
                reporter.join()
