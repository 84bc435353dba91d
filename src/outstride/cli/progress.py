"""How far a long command is: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outstride.cli import screen

_EVERY = 5.0
"""Seconds between lines where there is no terminal."""
Show = Callable[[float, str], None]
"""Takes the share that is done and a few words."""


def seconds_text(seconds: float) -> str:
    """A time that is left, as people say it."""
    if seconds >= 5400:
        return f"about {seconds / 3600:.1f} h left"
    if seconds >= 120:
        return f"about {seconds / 60:.0f} min left"
    return f"about {max(1, round(seconds))} s left"


@contextmanager
def progress(message: str) -> Iterator[Show]:
    """Yields what to call with how far it is; calls may come as often as they like."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = screen.console(error=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[words]}[/dim]"),
    )
    terminal, told = console.is_terminal, time.monotonic() - _EVERY

    with Progress(*columns, console=console, disable=not terminal) as bar:
        task = bar.add_task(message, total=1.0, words="")

        def show(share: float, words: str) -> None:
            nonlocal told
            if terminal:
                bar.update(task, completed=share, words=words)
            elif share >= 1.0 or time.monotonic() - told >= _EVERY:
                told = time.monotonic()
                print(f"{message}: {share:.0%}, {words}", file=sys.stderr, flush=True)

        yield show
