"""A server in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

MESSAGES: Any = [{"role": "user", "content": "say the thing in the box"}]


@dataclass(slots=True)
class Running:
    """What tests know of a server."""

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
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def metric(self, name: str) -> float:
        """One of the figures of /metrics."""
        text = httpx.get(f"{self.url}/metrics", headers=self.headers, timeout=30).text
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found, name
        return float(found[1])

    def until_ready(self, seconds: float = 60.0) -> float:
        """Waits for the model; how long it took."""
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            assert self.process.poll() is None, self.log.read_text()
            try:
                if httpx.get(f"{self.url}/ready", headers=self.headers, timeout=10).is_success:
                    return time.monotonic() - start
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"not ready after {seconds} s: {self.log.read_text()}")

    def until(self, name: str, value: float, seconds: float = 10.0) -> None:
        """Waits until a figure has a value."""
        end = time.monotonic() + seconds
        while self.metric(name) != value:
            assert time.monotonic() < end, (name, self.metric(name))
            time.sleep(0.02)

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


@contextmanager
def start(
    model: Path | str,
    log: Path,
    *options: str,
    key: str = "none",
    modest: bool = False,
    **environment: str,
) -> Iterator[Running]:
    """Starts a server and waits for its model; ends it afterwards.

    A modest one lets everybody else on the machine go first, a browser for instance, and takes a pause
    before each step, so that there is something to see.
    """
    port = free_port()
    command = [sys.executable, "-m", "outstride.cli", "serve", "--model", str(model)]
    command += ["--name", "tiny", "--port", str(port), *options]
    if modest:
        command = ["nice", "-n", "19", *command]
        environment["PYTHONPATH"] = str(Path(__file__).parent / "dawdling")
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
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
