"""The result format: one JSON object that says what was measured, on what, and with which build.

{"kind": "step",                what was measured
 "machine": {…},                cpu, cores, memory (bytes), accelerator, os
 "versions": {…},               outstride, python and the libraries that do the work
 "commit": "…" or null,         of the source, "+changes" if it was not clean
 "settings": {…},               everything that was chosen
 "samples": [{…}, …],           one per measured case: raw, so that others can sum up again
 "summary": {…},                what a reader looks at first
 "complete": true,              false if the run was cut short: what it had measured is there
 "started": "…",                UTC, ISO 8601
 "seconds": 12.3}               how long it all took
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import outstride
from outstride.bench import clock
from outstride.errors import OutstrideError

_FIELDS: dict[str, tuple[type, ...]] = {
    "kind": (str,),
    "machine": (dict,),
    "versions": (dict,),
    "commit": (str, type(None)),
    "settings": (dict,),
    "samples": (list,),
    "summary": (dict,),
    "complete": (bool,),
    "started": (str,),
    "seconds": (int, float),
}
_MACHINE = ("cpu", "cores", "memory", "accelerator", "os")
_LIBRARIES = ("torch", "numpy", "safetensors", "tokenizers", "gguf")


def _cpu() -> str:
    """The processor's name where the system has it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cores() -> int:
    """Number of cores that this process may use, which may be less than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _accelerator() -> str | None:
    """Name of the GPU, if torch is loaded; a measurement without torch used none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_name())


def machine() -> dict[str, Any]:
    """A description of the machine."""
    return {
        "cpu": _cpu(),
        "cores": _cores(),
        "memory": _memory(),
        "accelerator": _accelerator(),
        "os": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Versions of the libraries that take part in a pass; those not installed are left out."""
    found = {"outstride": outstride.__version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of this source, if it lies in a checkout that tracks it."""
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(here.parent), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # not somebody else's repository around us
        head = git("rev-parse", "HEAD")
        dirty = git("status", "--porcelain", "--", str(here.parents[1]))
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}+changes" if dirty else head


@dataclass(slots=True)
class BenchResult:
    """One measurement. Created at its start, which it records; `finish` fills it."""

    kind: str
    settings: dict[str, Any]
    samples: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=machine)
    versions: dict[str, str] = field(default_factory=versions)
    commit: str | None = field(default_factory=commit)
    complete: bool = False
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    seconds: float = 0.0
    _clock: float = field(default_factory=clock.now, repr=False, compare=False)

    def enter(self, samples: list[dict[str, Any]], summary: dict[str, Any]) -> None:
        """Sets what was measured so far."""
        self.samples, self.summary = samples, summary
        self.machine["accelerator"] = self.machine.get("accelerator") or _accelerator()
        self.seconds = clock.now() - self._clock

    def finish(self, samples: list[dict[str, Any]], summary: dict[str, Any]) -> BenchResult:
        """Sets the final samples and summary, and marks the result as complete."""
        self.enter(samples, summary)
        self.complete = True
        return self

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        return {name: values[name] for name in _FIELDS}

    def to_json(self) -> str:
        """One line."""
        return json.dumps(self.to_dict(), ensure_ascii=False)


def validate(values: object, source: str = "result") -> dict[str, Any]:
    """Returns the object if it is a valid result; otherwise raises an error that says what is wrong."""
    if not isinstance(values, Mapping):
        raise OutstrideError(f"{source}: a result is a JSON object, not {type(values).__name__}")
    for name, kinds in _FIELDS.items():
        if name not in values:
            raise OutstrideError(f"{source}: the field {name!r} is missing")
        if not isinstance(values[name], kinds) or (
            isinstance(values[name], bool) and bool not in kinds
        ):
            raise OutstrideError(
                f"{source}: the field {name!r} is of type {type(values[name]).__name__}"
            )
    if unknown := sorted(set(values) - set(_FIELDS)):
        raise OutstrideError(f"{source}: unknown field {unknown[0]!r}")
    if missing := [name for name in _MACHINE if name not in values["machine"]]:
        raise OutstrideError(f"{source}: machine lacks {missing[0]!r}")
    if not all(isinstance(sample, Mapping) for sample in values["samples"]):
        raise OutstrideError(f"{source}: samples must be objects")
    return dict(values)


def write(result: BenchResult, path: str | Path) -> None:
    """Writes a result to a file atomically."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    part.write_text(json.dumps(result.to_dict(), ensure_ascii=False, indent=2) + "\n", "utf-8")
    part.replace(target)


def read(path: str | Path) -> BenchResult:
    """Reads a result from a file and validates it."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise OutstrideError(f"{path}: not JSON: {error}") from error
    return BenchResult(**validate(values, str(path)))
