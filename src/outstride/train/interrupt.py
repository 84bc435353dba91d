"""Ctrl-C between two steps instead of within one, so that a checkpoint never holds half a step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether an interrupt was requested. A second signal interrupts at
    once.

    Outside the main thread signals are not delivered, and nothing is changed.
    """
    asked = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
