"""Virtual environments of engines that need other versions of libraries than this project.

`make peers` creates one environment for each such engine. This module imports nothing of the bench, so
that the suite and the peers can both use it.
"""

from __future__ import annotations

import sys
from pathlib import Path

ENVIRONMENTS = Path(sys.prefix) / "peers"
"""Where `make peers` creates the environments, one folder for each engine."""


def environment_python(name: str, environments: Path | None = None) -> Path | None:
    """The Python of an engine's own environment, or None if there is no such environment."""
    own = (environments or ENVIRONMENTS) / name / "bin" / "python"
    return own if own.exists() else None


def interpreter(name: str, environments: Path | None = None) -> str:
    """The Python that runs an engine: that of its own environment, else the current one."""
    return str(environment_python(name, environments) or sys.executable)


def site_packages(name: str, environments: Path | None = None) -> Path | None:
    """The folder of packages in an engine's own environment, or None if there is none."""
    found = sorted(((environments or ENVIRONMENTS) / name).glob("lib/python3*/site-packages"))
    return found[-1] if found else None
