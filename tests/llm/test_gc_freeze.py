"""The garbage collector skips imported objects and nothing else."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, weakref
from outstride.llm.gc_freeze import freeze_imports

class Knot:
    def __init__(self):
        self.me = self

enabled, threshold = gc.isenabled(), gc.get_threshold()
gc.disable()
early = weakref.ref(Knot())  # garbage already
gc.enable()
freeze_imports()
assert early() is None
frozen = gc.get_freeze_count()
assert frozen > 50_000, frozen
assert len(gc.get_objects()) < frozen / 10
late = weakref.ref(Knot())
gc.collect()
assert late() is None
freeze_imports()  # the second model: objects of the first one are still collected
assert gc.get_freeze_count() <= frozen
assert (gc.isenabled(), gc.get_threshold()) == (enabled, threshold)
"""


def test_only_imports_are_frozen() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
