"""Engines in processes and environments of their own.

An engine may need other versions of libraries than those installed here. An engine that uses
instructions which a virtual machine announces and does not permit crashes; the benchmark must
survive that and report it.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import IO, Any

from outstride.bench import clock
from outstride.bench.peer_environments import interpreter
from outstride.bench.peers.peer import PeerSetup, library
from outstride.errors import OutstrideError

HERE = Path(__file__).resolve().parents[3]
EXIT_TIMEOUT = 20.0
"""Seconds to wait for a process to end."""


_LOOK = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"


def look_for(package: str, python: str) -> None:
    """Raises an error if a package is not installed, without starting the engine."""
    if subprocess.run([python, "-c", _LOOK, package], check=False).returncode:
        raise OutstrideError(
            f"{package} cannot be imported: it is not installed; `make peers` makes an environment "
            "for it"
        )


class PeerProcess:
    """A process that runs an engine. Each request gets a response of one line."""

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

    def ask(self, request: dict[str, Any]) -> Any:
        """The response; raises an error if the engine reports one or has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise OutstrideError(f"{self.name} ended: {self._end()}")
        response = json.loads(line)
        if isinstance(response, dict):
            raise OutstrideError(response["error"])
        return response

    def _end(self) -> str:
        """How the process ended, and the last line that it printed."""
        try:
            code = self._process.wait(EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            return "it does not respond"
        how = f"exit status {code}"
        if code < 0:
            how = signal.strsignal(-code) or f"signal {-code}"
        if code == -signal.SIGILL:
            how += "; it uses instructions that this processor announces but does not permit"
        self._log.seek(0)
        last = self._log.read().decode(errors="replace").strip().splitlines()[-1:]
        return "; ".join([how, *last])

    def close(self) -> None:
        """Ends the process by closing its input."""
        if self._log.closed:
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                stream.close()
        try:
            self._process.wait(EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


class SubprocessPeer:
    """One setting of an engine in a child process."""

    def __init__(
        self, process: PeerProcess, number: int, about: dict[str, Any], threads: int
    ) -> None:
        self._link, self._number = process, number
        self.name: str = about["name"]
        self.settings: dict[str, Any] = {"threads": threads} | about["settings"]

    def fits(self, count: int) -> bool:
        return count > 0

    def generate(self, prompts: Sequence[Sequence[int]], output: int) -> list[list[int]]:
        given = [list(prompt) for prompt in prompts]
        response = self._link.ask({"peer": self._number, "prompts": given, "output": output})
        return [[int(token) for token in tokens] for tokens in response]

    def once(self, nodes: int, cached: int) -> clock.Case | None:
        del nodes, cached
        return None  # passes cannot be called one by one

    def close(self) -> None:
        self._link.close()


@contextmanager
def _unpacked(path: Path) -> Iterator[Path]:
    """A GGUF file as a checkpoint folder, for engines that load nothing else."""
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


def _open(name: str, package: str, setup: PeerSetup, *, folder: bool) -> list[SubprocessPeer]:
    request = asdict(setup)
    python = interpreter(name, request.pop("environments"))
    look_for(package, python)
    process = PeerProcess(name, python)
    try:
        with _unpacked(setup.path) if folder else nullcontext(setup.path) as path:
            description = process.ask({**request, "path": str(path)})
    except BaseException:
        process.close()
        raise
    return [
        SubprocessPeer(process, number, one, setup.threads)
        for number, one in enumerate(description)
    ]


def opener(
    name: str, package: str, *, folder: bool = False
) -> Callable[[PeerSetup], list[SubprocessPeer]]:
    """A function that opens an engine by the name of its file here; `folder` if it cannot load GGUF
    files.
    """
    return partial(_open, name, package, folder=folder)
