"""Engines in processes of their own, and in environments of their own.

An engine may need other versions of the libraries that are installed here. And one that takes
instructions which a virtual machine announces and refuses dies; the bench must survive that, and say
so.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import IO, Any

from outstride.bench import clock
from outstride.bench.peers.peer import Ground, library
from outstride.errors import OutstrideError

ENVIRONMENTS = Path(sys.prefix) / "peers"
"""Where `make peers` puts an environment for each engine."""
HERE = Path(__file__).resolve().parents[3]
PATIENCE = 20.0


def made(name: str, environments: Path | None = None) -> Path | None:
    """The Python of the environment that was made for an engine, if one was."""
    own = (environments or ENVIRONMENTS) / name / "bin" / "python"
    return own if own.exists() else None


def interpreter(name: str, environments: Path | None = None) -> str:
    """Where an engine runs: in its own environment; without one, here."""
    return str(made(name, environments) or sys.executable)


_LOOK = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"


def look_for(package: str, python: str) -> None:
    """Refuses, in words, what is not installed: sooner than by starting it."""
    if subprocess.run([python, "-c", _LOOK, package], check=False).returncode:
        raise OutstrideError(
            f"{package} cannot be imported: it is not installed; `make peers` makes an environment "
            "for it"
        )


class Link:
    """A process with an engine in it. What is asked is answered by one line."""

    def __init__(self, name: str, python: str) -> None:
        self.name = name
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as this)
        path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [python, "-m", "outstride.bench.peers.child", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": path},
            encoding="utf-8",
        )

    def ask(self, words: dict[str, Any]) -> Any:
        """The answer; an error in words if the engine has one, or is no more."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise OutstrideError(f"{self.name} ended: {self._end()}")
        said = json.loads(line)
        if isinstance(said, dict):
            raise OutstrideError(said["error"])
        return said

    def _end(self) -> str:
        """How it ended, and the last that it said."""
        try:
            code = self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return "it answers no more"
        how = f"exit status {code}"
        if code < 0:
            how = signal.strsignal(-code) or f"signal {-code}"
        if code == -signal.SIGILL:
            how += "; it uses instructions that this processor announces and refuses"
        self._log.seek(0)
        last = self._log.read().decode(errors="replace").strip().splitlines()[-1:]
        return "; ".join([how, *last])

    def close(self) -> None:
        """Ends it: the end of its input is the sign."""
        if self._log.closed:
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                stream.close()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


class Distant:
    """One setting of an engine behind a link."""

    def __init__(self, link: Link, number: int, told: dict[str, Any], threads: int) -> None:
        self._link, self._number = link, number
        self.name: str = told["name"]
        self.settings: dict[str, Any] = {"threads": threads} | told["settings"]

    def fits(self, count: int) -> bool:
        return count > 0

    def generate(self, prompts: Sequence[Sequence[int]], output: int) -> list[list[int]]:
        given = [list(prompt) for prompt in prompts]
        said = self._link.ask({"peer": self._number, "prompts": given, "output": output})
        return [[int(token) for token in tokens] for tokens in said]

    def once(self, nodes: int, cached: int) -> clock.Case | None:
        del nodes, cached
        return None  # passes cannot be called one by one

    def close(self) -> None:
        self._link.close()


@contextmanager
def _unpacked(path: Path) -> Iterator[Path]:
    """A GGUF file as the folder of a checkpoint, for engines that read nothing else."""
    if path.is_dir():
        yield path
        return
    lib = library("transformers", "it unpacks GGUF files: pip install 'outstride[dev]'")
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):  # its bars
        place = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        weights = lib.AutoModelForCausalLM.from_pretrained(**place).state_dict()
        # What was read from a GGUF file counts as quantized and cannot be saved, though it is not.
        config = lib.AutoConfig.from_pretrained(**place)
        model = lib.AutoModelForCausalLM.from_config(config)
        model.load_state_dict(weights)
        model.save_pretrained(folder)
        yield Path(folder)


def _open(name: str, package: str, ground: Ground, *, folder: bool) -> list[Distant]:
    words = asdict(ground)
    python = interpreter(name, words.pop("environments"))
    look_for(package, python)
    link = Link(name, python)
    try:
        with _unpacked(ground.path) if folder else nullcontext(ground.path) as path:
            told = link.ask({**words, "path": str(path)})
    except BaseException:
        link.close()
        raise
    return [Distant(link, number, one, ground.threads) for number, one in enumerate(told)]


def opener(name: str, package: str, *, folder: bool = False) -> Callable[[Ground], list[Distant]]:
    """Opens an engine by the name of its file here; `folder` if it cannot read GGUF files."""
    return partial(_open, name, package, folder=folder)
