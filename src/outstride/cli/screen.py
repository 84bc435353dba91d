"""Terminal output: answers and results on standard output, everything else on standard error."""

from __future__ import annotations

import os
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from outstride.errors import OutstrideError

if TYPE_CHECKING:
    from rich.console import Console

    from outstride.results import Completion

_SPINNER_DELAY = 0.5
"""Seconds before a spinner appears."""
_WIDE = 120
"""Columns of a table that is written to a file or a pipe."""


def debugging() -> bool:
    """Whether tracebacks are shown (`OUTSTRIDE_DEBUG=1`)."""
    return os.environ.get("OUTSTRIDE_DEBUG") == "1"


def console(*, error: bool = False) -> Console:
    """A rich console for tables and colours; generated text never goes through it."""
    from rich.console import Console

    stream = sys.stderr if error else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _WIDE
    return Console(stderr=error, width=width, highlight=False)


def explain(error: BaseException) -> str:
    """The text of an error in one line."""
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    elif isinstance(error, OutstrideError):
        text = str(error)
    else:
        kind = type(error).__name__
        text = f"{kind}: {error} (unexpected; OUTSTRIDE_DEBUG=1 shows where)"
    return " ".join(text.split())


def report_error(error: BaseException) -> None:
    """Prints an error on standard error."""
    sys.stdout.flush()
    print(f"error: {explain(error)}", file=sys.stderr, flush=True)


def note(text: str) -> None:
    """Prints a remark on standard error, if that is a terminal."""
    if sys.stderr.isatty():
        sys.stdout.flush()
        console(error=True).print(text, style="dim", markup=False, soft_wrap=True)


def clean(text: str) -> str:
    """Generated text without control characters, which could control the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def token_text(text: str) -> str:
    """A token for a table: line breaks and other control characters are escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class Writer:
    """Streams an answer to standard output, and remembers whether its last line has ended."""

    def __init__(self) -> None:
        self._at_line_start = True

    def write(self, text: str) -> None:
        text = clean(text)
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
            self._at_line_start = text.endswith("\n")

    def end_line(self) -> None:
        if not self._at_line_start:
            self.write("\n")


def stats_line(outputs: Sequence[Completion]) -> str:
    """Tokens, passes and speed of some answers in one line."""
    tokens = sum(output.stats.emitted for output in outputs)
    passes = sum(output.stats.passes for output in outputs)
    seconds = max((output.stats.seconds for output in outputs), default=0.0)
    per_pass = tokens / passes if passes else 0.0
    rate = tokens / seconds if seconds else 0.0
    return (
        f"{tokens} tokens, {passes} passes, {per_pass:.2f} tokens per pass, "
        f"{seconds:.2f} s, {rate:.1f} tok/s"
    )


@contextmanager
def waiting(message: str) -> Iterator[None]:
    """A spinner on standard error after half a second, if that is a terminal."""
    screen = console(error=True)
    if not screen.is_terminal:
        yield
        return
    status = screen.status(f"[dim]{message}…[/dim]")
    timer = threading.Timer(_SPINNER_DELAY, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()


@contextmanager
def bar(message: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error; yields a function that takes the done and the total count."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    screen = console(error=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[left]}[/dim]"),
    )
    start = time.monotonic()
    with Progress(
        *columns, console=screen, transient=True, disable=not screen.is_terminal
    ) as progress:
        task = progress.add_task(message, total=None, left="")

        def show(done: int, total: int) -> None:
            seconds = (time.monotonic() - start) / done * (total - done) if done else 0.0
            left = f"about {max(1, round(seconds))} s left" if seconds else ""
            progress.update(task, completed=done, total=total, left=left)

        yield show
