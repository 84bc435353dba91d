"""Progress of a long command: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outstride.cli import screen

_INTERVAL = 5.0
"""Seconds between lines where there is no terminal."""
Show = Callable[[float, str], None]
"""Takes the fraction that is done and a short status text."""


def seconds_text(seconds: float) -> str:
    """The remaining time in hours, minutes or seconds."""
    if seconds >= 5400:
        return f"about {seconds / 3600:.1f} h left"
    if seconds >= 120:
        return f"about {seconds / 60:.0f} min left"
    return f"about {max(1, round(seconds))} s left"


@contextmanager
def progress(message: str) -> Iterator[Show]:
    """Yields the function to call with the progress; it may be called often."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = screen.console(error=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[status]}[/dim]"),
    )
    terminal, shown = console.is_terminal, time.monotonic() - _INTERVAL

    with Progress(*columns, console=console, disable=not terminal) as bar:
        task = bar.add_task(message, total=1.0, status="")

        def show(fraction: float, status: str) -> None:
            nonlocal shown
            if terminal:
                bar.update(task, completed=fraction, status=status)
            elif fraction >= 1.0 or time.monotonic() - shown >= _INTERVAL:
                shown = time.monotonic()
                print(f"{message}: {fraction:.0%}, {status}", file=sys.stderr, flush=True)

        yield show
