"""Runs code that a model wrote: in a process of its own, with limits on time, memory and files.

What confines it is `jail.py`, inside that process; what this side adds is a clock on the wall, an empty
environment, an empty folder to be in, and nothing to read from or write to but one short answer.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from outstride.bench import clock, jail
from outstride.errors import OutstrideError

SECONDS = 5.0
"""Of the processor's time."""
PATIENCE = 4.0
"""So many times that by the clock on the wall: a program is not to blame for a busy machine."""
MEMORY = 512 << 20
_JAIL = Path(jail.__file__)
_ANSWER = 1000
"""Bytes that are read of what a program says about its end."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended."""

    passed: bool
    """It came to its end without an error."""
    said: str


def ready() -> None:
    """Raises an error where generated code cannot be confined; there it is not run at all."""
    if not jail.supported():
        raise OutstrideError(
            "code that a model wrote is run only where it can be confined: Linux on x86-64 or arm64"
        )


def run(program: str, *, seconds: float = SECONDS, memory: int = MEMORY) -> Outcome:
    """Runs a program to its end, or to that of its time."""
    ready()
    reading, writing = os.pipe()
    end = clock.now() + PATIENCE * seconds
    with TemporaryDirectory() as folder, os.fdopen(reading, "rb", buffering=0) as answer:
        command = [sys.executable, "-I", "-S", "-B", str(_JAIL)]
        command += [str(max(1, round(seconds))), str(memory), str(writing)]
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(writing,),
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            os.close(writing)
            assert child.stdin is not None
            try:
                child.stdin.write(program.encode("utf-8", "replace"))
                child.stdin.close()
            except BrokenPipeError:
                pass
            waited, _, _ = select.select([answer], [], [], max(0.0, end - clock.now()))
            said = answer.read(_ANSWER).decode("utf-8", "replace") if waited else "out of time"
        finally:
            os.killpg(child.pid, signal.SIGKILL)  # it is still there as long as nobody waits for it
            child.wait()
    if said.startswith("open "):
        raise OutstrideError(f"generated code is not run: it cannot be confined ({said[5:]})")
    return Outcome(said == "done", said or "ended without a word")
