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

from outstride.errors import OutstrideError

CURVE = "1=6.1,2=7.7,4=8,8=9.7,16=13.4,32=22,64=48.4"
"""What passes cost on one machine with two cores. Given to all, `auto` drafts the same everywhere, and
tokens per pass can be compared exactly."""
PATIENCE = 120.0


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


def parts(choice: Choice) -> list[Part]:
    """All parts in order; quick ones show that everything works, and nothing else."""
    quick = choice.quick
    model = ("--model", choice.model, "--weights", choice.weights)
    curve = ("--cost", CURVE)
    few = ("--repeat", "1") if quick else ()
    found = [
        Part("step", ("step", *model, *(few or ("--repeat", "5"))), 40),
        Part(
            "against", ("step", "--against", "llama.cpp", *model, *(few or ("--repeat", "3"))), 220
        ),
        Part(
            "peers",
            ("peers", *model, *few)
            + (
                ("--limit", "2", "--tokens", "8", "--batch", "1,2", "--nodes", "1,8")
                if quick
                else ()
            ),
            200,
        ),
        Part(
            "decode",
            ("decode", "--methods", "exact", *model, *curve)
            + (("--limit", "8", "--max-tokens", "12") if quick else ("--max-tokens", "64")),
            330,
        ),
        Part(
            "batches",
            ("decode", "--methods", "auto mix ngram", *model, *curve, "--temperature", "0,0.8")
            + (
                ("--batch", "1,4", "--limit", "8", "--max-tokens", "8")
                if quick
                else ("--batch", "1,4,16", "--limit", "32", "--max-tokens", "64")
            ),
            240,
        ),
        Part(
            "parallel",
            ("parallel", "--limit", "10")
            + (
                ("--limit", "1", "--tasks", "copy sort", "--policies", "verify factor")
                if quick
                else ()
            ),
            100,
        ),
        Part(
            "serve",
            ("serve", "--model", choice.model)
            + (
                (
                    "--rate",
                    "4,8",
                    "--requests",
                    "4",
                    "--tokens",
                    "8",
                    "--limit",
                    "4",
                    "--clients",
                    "2",
                )
                if quick
                else ("--rate", "0.5,1,2,4", "--requests", "24", "--tokens", "64", "--limit", "32")
            ),
            150,
            served=True,
        ),
    ]
    files = [(f"--{n}", f) for n in ("gsm8k", "humaneval") if (f := getattr(choice, n)) is not None]
    if files:
        found.append(
            Part(
                "quality",
                ("quality", "--methods", choice.methods, *model)
                + tuple(word for pair in files for word in pair)
                + (("--limit", "2", "--max-tokens", "16") if quick else ("--limit", "40")),
                240,
            )
        )
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
