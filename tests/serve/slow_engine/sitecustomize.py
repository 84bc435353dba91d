"""Python imports this when a slow test server starts: its engine pauses before every step.

A tiny model generates thousands of tokens before a browser has shown the first one: a test that stops
an answer or looks at a growing one would come too late.
"""

from __future__ import annotations

import time
from typing import Any

from outstride.engine.engine import Engine

PAUSE = 0.003

_step = Engine.step


def _slow_step(self: Engine, *given: Any) -> None:
    time.sleep(PAUSE)
    _step(self, *given)


Engine.step = _slow_step  # type: ignore[method-assign,assignment]
