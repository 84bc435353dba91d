"""The parts of `outstride bench all`, and a server for the part that needs one."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from outstride.bench.peer_environments import environment_python
from outstride.errors import OutstrideError

CURVE = "1=6.1,2=7.7,4=8,8=9.7,16=13.4,32=22,64=48.4"
"""Cost curve of one machine with two cores. With this curve, `auto` drafts the same everywhere, so
tokens per pass can be compared exactly.
"""
READY_TIMEOUT = 120.0
FAR = {"openvino": 50.0, "vllm": 280.0}
"""Seconds that engines in their own environments add; most of vLLM's are its start-up."""


@dataclass(frozen=True, slots=True)
class SuitePart:
    """One benchmark: the name of its file, its arguments, and its seconds on two cores."""

    name: str
    arguments: tuple[str, ...]
    seconds: float
    served: bool = False
    """Whether it needs a server."""


@dataclass(frozen=True, slots=True)
class SuiteOptions:
    """The user's options."""

    model: str
    weights: str
    device: str = "auto"
    quick: bool = False
    only: tuple[str, ...] = ()
    gsm8k: str | None = None
    humaneval: str | None = None
    methods: str = "auto"
    """Methods of the quality part."""


Arguments = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _PlannedPart:
    """A part with the arguments that a full run adds, and those that a quick run adds."""

    name: str
    arguments: Arguments
    full: Arguments
    quick: Arguments
    seconds: float
    served: bool = False


def _plans(choice: SuiteOptions) -> list[_PlannedPart]:
    """All parts in order. Seconds are those of two idle cores."""
    model: Arguments = ("--model", choice.model, "--device", choice.device)
    model += ("--weights", choice.weights)
    curve: Arguments = ("--cost", CURVE)
    once: Arguments = ("--repeat", "1")
    return [
        _PlannedPart("step", ("step", *model), ("--repeat", "11"), once, 20),
        _PlannedPart(
            "against",
            ("step", "--against", "llama.cpp", "--prompts", "1024", *model),
            ("--repeat", "3"),
            once,
            220,
        ),
        _PlannedPart(
            "peers",
            ("peers", *model),
            ("--rounds", "3", "--tokens", "48"),
            (*once, "--limit", "2", "--tokens", "8", "--batch", "1,2", "--nodes", "1,8"),
            200 + sum(FAR[name] for name in FAR if environment_python(name)),
        ),
        _PlannedPart(
            "decode",
            ("decode", "--methods", "exact", *model, *curve),
            ("--limit", "20", "--rounds", "5", "--max-tokens", "64"),
            ("--limit", "8", "--max-tokens", "12"),
            530,
        ),
        _PlannedPart(
            "batches",
            ("decode", "--methods", "auto mix ngram", *model, *curve, "--temperature", "0,0.8"),
            ("--batch", "1,4,16", "--limit", "16", "--rounds", "3", "--max-tokens", "40"),
            ("--batch", "1,4", "--limit", "8", "--max-tokens", "8"),
            270,
        ),
        _PlannedPart(
            "parallel",
            ("parallel",),
            ("--limit", "10"),
            ("--limit", "1", "--tasks", "copy sort", "--policies", "verify factor"),
            40,
        ),
        _PlannedPart(
            "serve",
            ("serve", "--model", choice.model),
            ("--rate", "0.5,1,2,4", "--requests", "24", "--tokens", "64", "--limit", "32"),
            ("--rate", "4,8", "--requests", "4", "--tokens", "8", "--limit", "4", "--clients", "2"),
            120,
            served=True,
        ),
        *_scores(choice, model),
    ]


def _scores(choice: SuiteOptions, model: Arguments) -> list[_PlannedPart]:
    """The quality part, if there is a file of questions."""
    given = (("--gsm8k", choice.gsm8k), ("--humaneval", choice.humaneval))
    files = tuple(word for name, file in given if file is not None for word in (name, file))
    if not files:
        return []
    arguments = ("quality", "--methods", choice.methods, *model, *files)
    return [
        _PlannedPart(
            "quality", arguments, ("--limit", "40"), ("--limit", "2", "--max-tokens", "16"), 240
        )
    ]


def parts(choice: SuiteOptions) -> list[SuitePart]:
    """All parts in order. Quick parts only show that everything works."""
    found = [
        SuitePart(
            p.name, p.arguments + (p.quick if choice.quick else p.full), p.seconds, served=p.served
        )
        for p in _plans(choice)
    ]
    if unknown := [name for name in choice.only if name not in {part.name for part in found}]:
        raise OutstrideError(
            f"there is no part {unknown[0]!r}; parts are {', '.join(part.name for part in found)}"
        )
    return [part for part in found if not choice.only or part.name in choice.only]


def command(part: SuitePart, folder: Path, url: str | None = None) -> list[str]:
    """The command line of a part."""
    place = ["--url", url] if url else []
    out = ["--out", str(folder / f"{part.name}.json")]
    return [sys.executable, "-m", "outstride.cli", "bench", *part.arguments, *place, *out]


class RemainingTime:
    """Estimates the time of the remaining parts from those that are done."""

    def __init__(self, planned: Sequence[SuitePart]) -> None:
        self._planned = list(planned)
        self._expected = self._took = 0.0

    def done(self, part: SuitePart, seconds: float) -> None:
        self._planned.remove(part)
        self._expected += part.seconds
        self._took += seconds

    @property
    def left(self) -> float:
        pace = self._took / self._expected if self._expected else 1.0
        return pace * sum(part.seconds for part in self._planned)


def in_words(seconds: float) -> str:
    """A rough duration as text."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    return f"about {round(seconds / 60)} minutes"


@contextmanager
def serving(model: str, weights: str, log: Path, device: str = "auto") -> Iterator[str]:
    """Starts a server on loopback, waits until it is ready, and yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    arguments = [
        sys.executable,
        "-m",
        "outstride.cli",
        "serve",
        "--model",
        model,
        "--port",
        str(port),
    ]
    arguments += ["--name", model, "--device", device, "--weights", weights]
    with log.open("wb") as out, subprocess.Popen(arguments, stdout=out, stderr=out) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            _until_ready(url, process, log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + READY_TIMEOUT
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=10):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise OutstrideError(f"the server did not become ready; see {log}")
