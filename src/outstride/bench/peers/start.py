"""Start-up time of a program to its first output, and its peak memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from outstride.bench.comparison_rows import Bound, Row
from outstride.errors import OutstrideError

_CHILD = """
import json, os, subprocess, sys, time
start = time.perf_counter()
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
first = child.stdout.read(1)
seconds = time.perf_counter() - start
child.stdout.read()
errors = child.stderr.read().decode(errors="replace")
_, status, usage = os.wait4(child.pid, 0)
code = os.waitstatus_to_exitcode(status)
print(json.dumps([code, bool(first), seconds, usage.ru_maxrss, errors[-500:]]))
"""
"""Starts a program and measures it. This runs in a process of its own, because the peak memory of a
child starts at that of its parent.
"""


def watch_child(command: Sequence[str]) -> tuple[float, float]:
    """Seconds until a program prints something, and its peak memory in bytes."""
    ran = subprocess.run(
        [sys.executable, "-I", "-c", _CHILD, *command], capture_output=True, text=True, check=True
    )
    code, printed, seconds, peak, errors = json.loads(ran.stdout)
    if code or not printed:
        raise OutstrideError(f"{command[0]} ended with {code}: {errors.strip()}")
    return float(seconds), float(peak) * (1 if sys.platform == "darwin" else 1024)


def start(
    command: Sequence[str],
    *,
    repeat: int = 3,
    watcher: Callable[[Sequence[str]], Any] = watch_child,
) -> list[Row]:
    """Start-up time of `command` to its first output and its peak memory, with warm files."""
    found = [watcher(command) for _ in range(repeat + 1)][1:]
    seconds, peaks = [s for s, _ in found], [p / 1e6 for _, p in found]
    return [
        Row(
            "start to first token",
            "s",
            median(seconds),
            None,
            Bound(3.0, of="value"),
            raw={"ours": seconds},
        ),
        Row("peak memory", "MB", max(peaks), None, Bound(900.0, of="value"), raw={"ours": peaks}),
    ]


def load_average() -> list[float]:
    """The machine's load average."""
    return [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else []
