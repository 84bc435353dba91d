"""Everything at once: the parts of `outstride bench all`, and a server for the part that needs one."""

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

from outstride.bench.peers import distant
from outstride.errors import OutstrideError

CURVE = "1=6.1,2=7.7,4=8,8=9.7,16=13.4,32=22,64=48.4"
"""What passes cost on one machine with two cores. Given to all, `auto` drafts the same everywhere, and
tokens per pass can be compared exactly."""
PATIENCE = 120.0
FAR = {"openvino": 50.0, "vllm": 280.0}
"""Seconds that engines in environments of their own add; most of vLLM's go into its start."""


@dataclass(frozen=True, slots=True)
class Part:
    """One bench: the name of its file, what it is called with, and what it takes on two cores."""

    name: str
    arguments: tuple[str, ...]
    seconds: float
    served: bool = False
    """Whether it needs a server."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What the user chose."""

    model: str
    weights: str
    quick: bool = False
    only: tuple[str, ...] = ()
    gsm8k: str | None = None
    humaneval: str | None = None
    methods: str = "auto"
    """Of the quality part."""


Words = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Plan:
    """A part as it is planned: what a whole run adds to its command, and what a quick one does."""

    name: str
    words: Words
    whole: Words
    quick: Words
    seconds: float
    served: bool = False


def _plans(choice: Choice) -> list[_Plan]:
    """All parts in order. Seconds are those of two quiet cores."""
    model: Words = ("--model", choice.model, "--weights", choice.weights)
    curve: Words = ("--cost", CURVE)
    once: Words = ("--repeat", "1")
    return [
        _Plan("step", ("step", *model), ("--repeat", "11"), once, 20),
        _Plan("against", ("step", "--against", "llama.cpp", *model), ("--repeat", "3"), once, 220),
        _Plan(
            "peers",
            ("peers", *model),
            ("--rounds", "3", "--tokens", "48"),
            (*once, "--limit", "2", "--tokens", "8", "--batch", "1,2", "--nodes", "1,8"),
            200 + sum(FAR[name] for name in FAR if distant.made(name)),
        ),
        _Plan(
            "decode",
            ("decode", "--methods", "exact", *model, *curve),
            ("--limit", "20", "--rounds", "5", "--max-tokens", "64"),
            ("--limit", "8", "--max-tokens", "12"),
            530,
        ),
        _Plan(
            "batches",
            ("decode", "--methods", "auto mix ngram", *model, *curve, "--temperature", "0,0.8"),
            ("--batch", "1,4,16", "--limit", "16", "--rounds", "3", "--max-tokens", "40"),
            ("--batch", "1,4", "--limit", "8", "--max-tokens", "8"),
            270,
        ),
        _Plan(
            "parallel",
            ("parallel",),
            ("--limit", "10"),
            ("--limit", "1", "--tasks", "copy sort", "--policies", "verify factor"),
            40,
        ),
        _Plan(
            "serve",
            ("serve", "--model", choice.model),
            ("--rate", "0.5,1,2,4", "--requests", "24", "--tokens", "64", "--limit", "32"),
            ("--rate", "4,8", "--requests", "4", "--tokens", "8", "--limit", "4", "--clients", "2"),
            120,
            served=True,
        ),
        *_scores(choice, model),
    ]


def _scores(choice: Choice, model: Words) -> list[_Plan]:
    """Quality beside speed, if there is a file with questions."""
    given = (("--gsm8k", choice.gsm8k), ("--humaneval", choice.humaneval))
    files = tuple(word for name, file in given if file is not None for word in (name, file))
    if not files:
        return []
    words = ("quality", "--methods", choice.methods, *model, *files)
    return [_Plan("quality", words, ("--limit", "40"), ("--limit", "2", "--max-tokens", "16"), 240)]


def parts(choice: Choice) -> list[Part]:
    """All parts in order; quick ones show that everything works, and nothing else."""
    found = [
        Part(p.name, p.words + (p.quick if choice.quick else p.whole), p.seconds, served=p.served)
        for p in _plans(choice)
    ]
    if unknown := [name for name in choice.only if name not in {part.name for part in found}]:
        raise OutstrideError(
            f"there is no part {unknown[0]!r}; parts are {', '.join(part.name for part in found)}"
        )
    return [part for part in found if not choice.only or part.name in choice.only]


def command(part: Part, folder: Path, url: str | None = None) -> list[str]:
    """The command line of a part."""
    place = ["--url", url] if url else []
    out = ["--out", str(folder / f"{part.name}.json")]
    return [sys.executable, "-m", "outstride.cli", "bench", *part.arguments, *place, *out]


class Clock:
    """How long the remaining parts will take, going by those that are done."""

    def __init__(self, planned: Sequence[Part]) -> None:
        self._planned = list(planned)
        self._expected = self._took = 0.0

    def done(self, part: Part, seconds: float) -> None:
        self._planned.remove(part)
        self._expected += part.seconds
        self._took += seconds

    @property
    def left(self) -> float:
        pace = self._took / self._expected if self._expected else 1.0
        return pace * sum(part.seconds for part in self._planned)


def in_words(seconds: float) -> str:
    """About how long."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    return f"about {round(seconds / 60)} minutes"


@contextmanager
def serving(model: str, weights: str, log: Path) -> Iterator[str]:
    """A server of its own on loopback, ready; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    words = [sys.executable, "-m", "outstride.cli", "serve", "--model", model, "--port", str(port)]
    words += ["--name", model, "--weights", weights]
    with log.open("wb") as out, subprocess.Popen(words, stdout=out, stderr=out) as process:
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
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=10):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise OutstrideError(f"the server does not come up; {log} says why")
