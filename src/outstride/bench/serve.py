"""A server under load: tokens per second, gaps between tokens, where processor time goes, and soaking.

It speaks HTTP and knows nothing of the server but OpenAI's API, so that any other server can be put
under the same load. What only Outstride's own /metrics tells is added where it is there.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from outstride.errors import OutstrideError

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
    ) -> Streamed:
        """A request, streaming or not; `cancel_after` so many chunks, or `until` then, it hangs up."""
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
            await self._read(reader, found, chunked, cancel_after, until)
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


@dataclass(frozen=True, slots=True)
class Gaps:
    """Seconds between chunks of running requests, without and with a long prompt in between.

    The longer an answer, the longer each pass over it: what is usual while the prompt is read lies
    between what was usual before and what is usual afterwards.
    """

    usual: float
    """The median just before the prompt arrived."""
    after: float
    """The median once it was answered."""
    before: float
    """The longest before it arrived: what else the machine does."""
    longest: float
    """The longest while it was read."""
    ratio: float
    """The longest while it was read, against what is usual there."""
    most: float
    """Below so many times the usual stayed 95 of 100 while it was read."""
    series: list[tuple[float, float]]
    """(when, gap), for a plot; the prompt arrives at 0."""
    answered: float
    """When the prompt was answered."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "usual_gap_ms": round(1e3 * self.usual, 1),
            "usual_gap_after_ms": round(1e3 * self.after, 1),
            "longest_gap_before_ms": round(1e3 * self.before, 1),
            "longest_gap_ms": round(1e3 * self.longest, 1),
            "ratio": round(self.ratio, 2),
            "ratio_95": round(self.most, 2),
            "long_prompt_first_token_s": round(self.answered, 2),
        }


async def gaps(
    client: Client,
    model: str,
    *,
    running: int = 8,
    words: int = 3000,
    warm: float = 2.5,
    tokens: int = 1500,
) -> Gaps:
    """Running requests decode plainly for `warm` seconds; then a long prompt comes."""

    salt = str(time.time())
    end = math.inf
    gc.freeze()  # the client's own pauses would count as the server's

    def body(content: str, tokens: int) -> dict[str, Any]:
        return {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "cache_salt": salt,  # a prompt that was read before would not be read again
            # with its trace, a token is told even if its text is held back as half a character
            "outstride": {"method": "plain", "trace": True},
        }

    async def talk(number: int) -> Streamed:
        content = f"Tell me about the number {number}."
        return await client.send(path, body(content, tokens), until=lambda: end)

    path = "/v1/chat/completions"
    talks = [asyncio.create_task(talk(i)) for i in range(running)]
    await asyncio.sleep(warm)
    arrived = time.perf_counter()
    numbers = random.Random(0)
    text = " ".join(numbers.choice(("red", "green", "blue", "dog", "cat")) for _ in range(words))
    long = await client.send(path, body(text, 2))
    answered = long.events[0] if long.events else time.perf_counter()
    end = time.perf_counter() + 0.6 * warm
    done = await asyncio.gather(*talks)
    series = sorted(
        (now - arrived, now - last)
        for talk in done
        for last, now in zip(talk.events, talk.events[1:], strict=False)
    )
    said = next((talk.error or talk.text for talk in done if talk.status != 200), "too few tokens")
    return _compare(series, answered - arrived, said)


def _compare(series: list[tuple[float, float]], answered: float, said: str) -> Gaps:
    """The gaps while the prompt was read against those around them."""
    early = [gap for when, gap in series if when < 0]
    before = sorted(early[len(early) // 2 :])  # when the prompt arrived, not when they began
    after = sorted(gap for when, gap in series if when - gap > answered)
    during = [(when, gap) for when, gap in series if when >= 0 and when - gap <= answered]
    if not before or not during:
        raise OutstrideError(f"the server gave nothing to measure: {said}")
    usual = before[len(before) // 2]
    later = max(after[len(after) // 2], usual) if after else usual
    ratios = sorted(
        gap / (usual + (later - usual) * min(when / answered, 1.0)) for when, gap in during
    )
    return Gaps(
        usual=usual,
        after=later,
        before=before[-1],
        longest=max(gap for _, gap in during),
        ratio=ratios[-1],
        most=ratios[int(0.95 * len(ratios))],
        series=series,
        answered=answered,
    )


def plot(found: Gaps, *, width: int = 720, height: int = 240) -> str:
    """The gaps over time as an SVG."""
    left = min(when for when, _ in found.series)
    right = max(when for when, _ in found.series)
    top = max(max(gap for _, gap in found.series), 3.2 * found.after)

    def x(when: float) -> float:
        return 50 + (width - 60) * (when - left) / (right - left)

    def y(gap: float) -> float:
        return height - 30 - (height - 50) * gap / top

    dots = "".join(
        f'<circle cx="{x(when):.1f}" cy="{y(gap):.1f}" r="1.5"/>' for when, gap in found.series
    )
    bounds = ((left, found.usual), (0.0, found.usual), (found.answered, found.after))
    bound = " ".join(
        f"{x(when):.1f},{y(3 * usual):.1f}" for when, usual in (*bounds, (right, found.after))
    )
    ends = "".join(
        f'<text x="{place}" y="{y(gap):.1f}">{1e3 * gap:.0f} ms</text>'
        for place, gap in ((4, found.usual), (4, top))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">'
        f'<rect x="{x(0):.1f}" y="20" width="{x(found.answered) - x(0):.1f}" '
        f'height="{height - 50}" fill="#ddd"/><g fill="#36c">{dots}</g>'
        f'<polyline points="{bound}" stroke="#c33" fill="none"/>'
        f'<text x="52" y="{y(3 * found.usual) - 4:.1f}" fill="#c33">3 x the usual gap</text>'
        f'<text x="{x(0) + 3:.1f}" y="32">a long prompt is read</text>{ends}</svg>'
    )
