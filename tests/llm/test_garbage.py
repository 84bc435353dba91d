"""Imports are out of the garbage collector's sight; all else is its business as ever."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, weakref
from outstride.llm.garbage import spare_imports

class Knot:
    def __init__(self):
        self.me = self

enabled, threshold = gc.isenabled(), gc.get_threshold()
gc.disable()
early = weakref.ref(Knot())  # garbage already
gc.enable()
spare_imports()
assert early() is None
frozen = gc.get_freeze_count()
assert frozen > 50_000, frozen
assert len(gc.get_objects()) < frozen / 10
late = weakref.ref(Knot())
gc.collect()
assert late() is None
spare_imports()  # the second model: what the first one made stays in sight
assert gc.get_freeze_count() <= frozen
assert (gc.isenabled(), gc.get_threshold()) == (enabled, threshold)
"""


def test_imports_are_spared_and_nothing_else() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
