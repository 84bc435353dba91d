"""A server under load: tokens per second, and the share of its CPU time outside engine steps.

It speaks HTTP and uses only OpenAI's API, so that any other server can be put under the same load.
Figures of Outstride's own /metrics are added where they exist.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

CHUNK = 1 << 16


@dataclass(slots=True)
class StreamedResponse:
    """One request as its client saw it."""

    status: int = 0
    text: str = ""
    events: list[float] = field(default_factory=list)
    """Arrival time of each chunk."""
    tokens: int = 0
    finish: str | None = None
    error: str = ""
    seconds: float = 0.0


class Client:
    """A minimal client of one server; it shares the machine with the server that it measures."""

    def __init__(self, url: str, key: str = "none") -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._key = key

    async def send(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        cancel_after: int | None = None,
        until: Callable[[], float] = lambda: math.inf,
        timed: bool = False,
    ) -> StreamedResponse:
        """Sends a request, streaming or not.

        It closes the connection after `cancel_after` chunks, or at the time `until` returns. timed:
        only the arrival times of chunks are recorded; their contents are not parsed.
        """
        found, started = StreamedResponse(), time.perf_counter()
        data = b"" if body is None else json.dumps(body).encode()
        verb = "GET" if body is None else "POST"
        head = (
            f"{verb} {path} HTTP/1.1\r\nhost: {self._host}\r\nconnection: close\r\n"
            f"authorization: Bearer {self._key}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\n\r\n"
        )
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port)
        except OSError as error:
            found.error = str(error)
            return found
        try:
            writer.write(head.encode() + data)
            found.status = int((await reader.readline()).split()[1])
            chunked = False
            while (line := (await reader.readline()).strip().lower()) not in (b"", b"\r\n"):
                chunked = chunked or line == b"transfer-encoding: chunked"
            await self._read(reader, found, chunked, cancel_after, until, timed)
        except (OSError, asyncio.IncompleteReadError, IndexError, ValueError) as error:
            found.error = found.error or repr(error)
        finally:
            writer.close()
        found.seconds = time.perf_counter() - started
        return found

    async def _read(
        self,
        reader: asyncio.StreamReader,
        found: StreamedResponse,
        chunked: bool,
        cancel_after: int | None,
        until: Callable[[], float],
        timed: bool,
    ) -> None:
        whole = b""
        while True:
            if chunked:
                size = int(await reader.readline(), 16)
                chunk = await reader.readexactly(size)
                await reader.readexactly(2)
            else:
                chunk = await reader.read(CHUNK)
            if not chunk:
                break
            if not chunk.startswith(b"data: "):
                whole += chunk
                continue
            found.events.append(time.perf_counter())
            if not timed or b'{"error":' in chunk:
                for line in chunk.split(b"\n\n"):
                    _enter(line, found)
            enough = cancel_after is not None and len(found.events) >= cancel_after
            if enough or found.events[-1] > until():
                found.finish = "cancelled"
                return
        if whole:
            found.text = whole.decode("utf-8", "replace")
            if found.status == 200 and whole.startswith(b"{"):
                value = json.loads(whole)
                found.tokens = (value.get("usage") or {}).get("completion_tokens", 0)
                if value.get("choices"):
                    choice = value["choices"][0]
                    found.finish = choice["finish_reason"]
                    found.text = choice.get("message", {}).get("content") or choice.get("text", "")

    async def figures(self) -> dict[str, float]:
        """Metrics of an Outstride server; empty for other servers."""
        found = await self.send("/metrics")
        pairs = re.findall(r"^(outstride_\w+) (\S+)$", found.text, re.MULTILINE)
        return {name: float(value) for name, value in pairs}


def _enter(line: bytes, found: StreamedResponse) -> None:
    """Parses one server-sent event."""
    if not line.startswith(b"data: {"):
        return
    value = json.loads(line[6:])
    if "error" in value:
        found.error = str(value["error"].get("message"))
        return
    if usage := value.get("usage"):
        found.tokens = usage["completion_tokens"]
    for choice in value.get("choices", ()):
        found.text += choice.get("delta", {}).get("content") or choice.get("text") or ""
        found.finish = choice.get("finish_reason") or found.finish


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Results of a server under load."""

    requests: int
    failed: int
    tokens: int
    seconds: float
    outside: float | None
    """Share of the server's CPU time outside engine steps, if it reports that."""
    chunks: int

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def to_dict(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "failed": self.failed,
            "tokens": self.tokens,
            "chunks": self.chunks,
            "seconds": round(self.seconds, 2),
            "tokens_per_second": round(self.rate, 1),
            "cpu_outside_steps": None if self.outside is None else round(self.outside, 4),
        }


def outside_steps(before: dict[str, float], after: dict[str, float]) -> float | None:
    """Share of the CPU time between two readings that was not spent in engine steps."""
    names = (
        "outstride_engine_cpu_seconds_total",
        "outstride_http_cpu_seconds_total",
        "outstride_engine_step_cpu_seconds_total",
    )
    if not all(name in after and name in before for name in names):
        return None
    engine, http, steps = (after[name] - before[name] for name in names)
    return 1.0 - steps / (engine + http) if engine + http > 0 else None


async def load(
    client: Client, model: str, prompts: Sequence[str], *, clients: int, tokens: int, **body: Any
) -> LoadResult:
    """Streaming clients, each of which takes the next prompt when its answer is complete."""
    waiting = list(reversed(prompts))
    done: list[StreamedResponse] = []

    async def one() -> None:
        while waiting:
            prompt = waiting.pop()
            values = {
                "model": model,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                **body,
            }
            done.append(await client.send("/v1/chat/completions", values))

    before, started = await client.figures(), time.perf_counter()
    await asyncio.gather(*(one() for _ in range(clients)))
    seconds, after = time.perf_counter() - started, await client.figures()
    return LoadResult(
        requests=len(done),
        failed=sum(item.status != 200 or bool(item.error) for item in done),
        tokens=sum(item.tokens for item in done),
        seconds=seconds,
        outside=outside_steps(before, after),
        chunks=sum(len(item.events) for item in done),
    )
