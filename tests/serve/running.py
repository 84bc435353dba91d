"""A server in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

MESSAGES: Any = [{"role": "user", "content": "say the thing in the box"}]
CAP = 600.0
"""Seconds after which a wait gives up: far more than any wait takes, however busy the machine is."""
SLOW_ENGINE = Path(__file__).parent / "slow_engine"


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Polls a condition; fails only if it does not become true within `CAP` seconds."""
    end = time.monotonic() + CAP
    while not condition():
        assert time.monotonic() < end, f"after {CAP:g} s still not: {what}"
        time.sleep(0.02)


@dataclass(slots=True)
class Running:
    """A running server: its process, its address, its log and its API key."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    key: str = "none"

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str | None = None) -> openai.OpenAI:
        key = key or self.key
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=CAP)

    def metric(self, name: str) -> float:
        """One sample of /metrics, asked for again while the engine is too busy to report."""
        end = time.monotonic() + CAP
        while True:
            text = httpx.get(f"{self.url}/metrics", headers=self.headers, timeout=CAP).text
            found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
            if found:
                return float(found[1])
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, f"/metrics has no {name}"
            time.sleep(0.05)

    def until_ready(self) -> float:
        """Waits for the model while the process lives; returns how long it took."""
        start = time.monotonic()
        while time.monotonic() - start < CAP:
            assert self.process.poll() is None, self.log.read_text()
            try:
                if httpx.get(f"{self.url}/ready", headers=self.headers, timeout=CAP).is_success:
                    return time.monotonic() - start
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"not ready after {CAP:g} s: {self.log.read_text()}")

    def until(self, name: str, value: float) -> None:
        """Waits until a metric has a value."""
        wait_until(lambda: self.metric(name) == value, f"{name} == {value:g}")

    def engine(self) -> int:
        """The process id of the engine."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for child in children.read_text().split():
            if b"outstride.serve.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        raise AssertionError("no engine process")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def slow_engine() -> dict[str, str]:
    """The environment in which an engine pauses before each step."""
    path = filter(None, (str(SLOW_ENGINE), os.environ.get("PYTHONPATH")))
    return {"PYTHONPATH": os.pathsep.join(path)}


@contextmanager
def start(
    model: Path | str,
    log: Path,
    *options: str,
    key: str = "none",
    slow: bool = False,
    **environment: str,
) -> Iterator[Running]:
    """Starts a server and waits for its model; ends it afterwards.

    A slow one runs at the lowest priority, so that a browser next to it is served first, and pauses
    before each step, so that a test can see an answer grow.
    """
    port = free_port()
    command = [sys.executable, "-m", "outstride.cli", "serve", "--model", str(model)]
    command += ["--name", "tiny", "--port", str(port), *options]
    if slow:
        command = ["nice", "-n", "19", *command]
        environment |= slow_engine()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **environment}
        )
    running = Running(process, port, log, key)
    try:
        running.until_ready()
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
