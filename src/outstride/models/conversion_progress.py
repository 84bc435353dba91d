"""Progress of a conversion on standard error: a bar on a terminal, lines elsewhere if it takes long."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

_INTERVAL = 5.0
"""Seconds before the first line, and between lines, where there is no terminal."""


@contextmanager
def conversion_progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with numbers of weights that were converted, from any thread."""
    from rich.console import Console
    from rich.progress import Progress

    console, lock, label = Console(stderr=True), Lock(), f"Converting {name}"
    done, shown = 0, time.monotonic()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=total)

        def advance(count: int) -> None:
            nonlocal done, shown
            with lock:
                done += count
                bar.update(task, completed=done)
                if not console.is_terminal and time.monotonic() - shown >= _INTERVAL:
                    shown = time.monotonic()
                    share = min(done / total, 1)
                    print(f"{label} (first start only): {share:.0%}", file=sys.stderr, flush=True)

        yield advance
