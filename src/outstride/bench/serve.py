"""A server under load: tokens per second, and where its processor time goes.

It speaks HTTP and knows nothing of the server but OpenAI's API, so that any other server can be put
under the same load. What only Outstride's own /metrics tells is added where it is there.
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
class Streamed:
    """One request as its client saw it."""

    status: int = 0
    text: str = ""
    events: list[float] = field(default_factory=list)
    """When each chunk arrived."""
    tokens: int = 0
    finish: str | None = None
    error: str = ""
    seconds: float = 0.0


class Client:
    """A client of one server, as light as can be: it shares the machine with what it measures."""

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
    ) -> Streamed:
        """A request, streaming or not; `cancel_after` so many chunks, or `until` then, it hangs up.

        timed: it only matters when chunks come: what they say is not looked at.
        """
        found, started = Streamed(), time.perf_counter()
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
        found: Streamed,
        chunked: bool,
        cancel_after: int | None,
        until: Callable[[], float],
        timed: bool,
    ) -> None:
        whole = b""
        while True:
            if chunked:
                size = int(await reader.readline(), 16)
                piece = await reader.readexactly(size)
                await reader.readexactly(2)
            else:
                piece = await reader.read(CHUNK)
            if not piece:
                break
            if not piece.startswith(b"data: "):
                whole += piece
                continue
            found.events.append(time.perf_counter())
            if not timed or b'{"error":' in piece:
                for line in piece.split(b"\n\n"):
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
        """Outstride's own figures; none from other servers."""
        found = await self.send("/metrics")
        pairs = re.findall(r"^(outstride_\w+) (\S+)$", found.text, re.MULTILINE)
        return {name: float(value) for name, value in pairs}


def _enter(line: bytes, found: Streamed) -> None:
    """One server-sent event."""
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
class Load:
    """What a server did under load."""

    requests: int
    failed: int
    tokens: int
    seconds: float
    outside: float | None
    """Share of the server's processor time outside engine steps, if it tells."""
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
    """Of the processor time between two readings, the share that was not spent in engine steps."""
    names = ("outstride_engine_cpu_all", "outstride_http_cpu_seconds", "outstride_engine_cpu_steps")
    if not all(name in after and name in before for name in names):
        return None
    engine, http, steps = (after[name] - before[name] for name in names)
    return 1.0 - steps / (engine + http) if engine + http > 0 else None


async def load(
    client: Client, model: str, prompts: Sequence[str], *, clients: int, tokens: int, **body: Any
) -> Load:
    """Streaming clients, each taking the next prompt when its answer is complete."""
    waiting = list(reversed(prompts))
    done: list[Streamed] = []

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
    return Load(
        requests=len(done),
        failed=sum(item.status != 200 or bool(item.error) for item in done),
        tokens=sum(item.tokens for item in done),
        seconds=seconds,
        outside=outside_steps(before, after),
        chunks=sum(len(item.events) for item in done),
    )
