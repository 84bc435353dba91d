"""Runs code that a model wrote: in a process of its own, with limits on time, memory and files.

`jail.py` confines that process from inside. This side adds a wall-clock limit, an empty environment,
an empty working folder, and no channel but one short result.
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
"""CPU time limit."""
WALL_CLOCK_FACTOR = 4.0
"""The wall-clock limit in multiples of the CPU limit: a busy machine must not fail a program."""
MEMORY = 512 << 20
_JAIL = Path(jail.__file__)
_ANSWER = 1000
"""Bytes that are read of a program's result."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended."""

    passed: bool
    """Whether it ended without an error."""
    message: str


def ready() -> None:
    """Raises an error where generated code cannot be confined; it is never run unconfined."""
    if not jail.supported():
        raise OutstrideError(
            "code that a model wrote runs only where it can be confined: Linux on x86-64 or arm64"
        )


def run(program: str, *, seconds: float = SECONDS, memory: int = MEMORY) -> Outcome:
    """Runs a program until it ends or exceeds its time limit."""
    ready()
    reading, writing = os.pipe()
    end = clock.now() + WALL_CLOCK_FACTOR * seconds
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
            message = answer.read(_ANSWER).decode("utf-8", "replace") if waited else "out of time"
        finally:
            os.killpg(
                child.pid, signal.SIGKILL
            )  # it is still there as long as nothing waits for it
            child.wait()
    if message.startswith("open "):
        raise OutstrideError(f"generated code is not run: it cannot be confined ({message[5:]})")
    return Outcome(message == "done", message or "ended without a message")
