"""Found by servers of page tests when they start: their engine takes its time for every step.

A tiny model says thousands of tokens before a browser has shown the first one: a test that stops or
watches it would come too late.
"""

from __future__ import annotations

import time
from typing import Any

from outstride.engine.engine import Engine

PAUSE = 0.003

_step = Engine.step


def _dawdling(self: Engine, *given: Any) -> None:
    time.sleep(PAUSE)
    _step(self, *given)


Engine.step = _dawdling  # type: ignore[method-assign,assignment]
