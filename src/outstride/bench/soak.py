"""A soak test: many clients for some minutes with mixed requests, and a check of what is left.

Every request must get exactly one response, of the expected kind. Afterwards no request may be
running, no page may be lost, memory must not have grown, and answers under load must equal those
given alone.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outstride import registry
from outstride.bench.serve import Client, StreamedResponse
from outstride.core.contracts import Exactness

PATH = "/v1/chat/completions"
WORDS = (
    "red",
    "green",
    "blue",
    "dog",
    "cat",
    "house",
    "river",
    "seven",
    "story",
    "why",
    "the",
    "a",
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "count"],
    "additionalProperties": False,
}


@dataclass(slots=True)
class SoakReport:
    """Results of a soak test."""

    asked: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """What should not have happened; empty if all went well."""
    kept: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)
    """(seconds, resident bytes of the engine)."""
    compared: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "asked": self.asked,
            "answered": sum(self.outcomes.values()),
            "outcomes": dict(self.outcomes),
            "wrong": self.wrong[:20],
            "compared_with_solo": self.compared,
            "memory": [[round(s, 1), int(b)] for s, b in self.memory],
        }


def _request(
    numbers: random.Random, model: str, methods: Sequence[str]
) -> tuple[str, dict[str, Any]]:
    """A random kind of request and its body."""
    kind = numbers.choices(
        ("plain", "stream", "schema", "cancel", "malformed"), (30, 35, 15, 12, 8)
    )[0]
    text = " ".join(numbers.choice(WORDS) for _ in range(numbers.randrange(1, 120)))
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": numbers.randrange(1, 60),
        "temperature": numbers.choice((0, 0, 0.8, 1.2)),
        "seed": numbers.randrange(1000),
        "n": numbers.choice((1, 1, 1, 2)),
        "priority": numbers.randrange(-1, 2),
        "stream": kind in ("stream", "cancel"),
        "outstride": {"method": numbers.choice(methods)},
    }
    if kind == "schema":
        body |= {"max_tokens": 60, "n": 1, "response_format": _FORMAT}
    if kind == "malformed":
        body |= numbers.choice(
            (
                {"temperature": -3},
                {"outstride": {"method": "none such"}},
                {"messages": []},
                {"stop": 7},
                {"response_format": {"type": "json_schema"}},
                {"n": 10**6},
            )
        )
    return kind, body


_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def _judge(kind: str, found: StreamedResponse) -> tuple[str, str | None]:
    """The outcome of a request, and what is wrong with it."""
    outcome = f"{kind}: {found.finish or found.status}"
    if found.status == 429:
        return "refused", None
    if kind == "malformed":
        return outcome, None if found.status == 400 else f"malformed got {found.status}"
    if found.status != 200 or found.error:
        return outcome, f"{kind} got {found.status} {found.error} {found.text[:200]}"
    if kind == "schema" and found.finish == "stop":
        try:
            json.loads(found.text)
        except ValueError:
            return outcome, f"not JSON: {found.text!r}"
    if kind == "schema" and found.finish != "stop":
        return outcome, f"a structured output was cut off: {found.text!r}"
    if found.finish is None:
        return outcome, f"{kind} has no end"
    return outcome, None


async def soak(
    client: Client,
    model: str,
    *,
    methods: Sequence[str],
    clients: int = 64,
    seconds: float = 300.0,
    compare: int = 100,
    seed: int = 0,
) -> SoakReport:
    """Puts a server under load for a while and checks what is left."""
    registry.discover()
    found, end = SoakReport(), time.monotonic() + seconds
    started = time.monotonic()

    async def one(number: int) -> None:
        numbers = random.Random(seed * 1000 + number)
        while time.monotonic() < end:
            kind, body = _request(numbers, model, methods)
            found.asked += 1
            after = numbers.randrange(1, 5) if kind == "cancel" else None
            answer = await client.send(PATH, body, cancel_after=after)
            outcome, wrong = _judge(kind, answer)
            found.outcomes[outcome] += 1
            if wrong:
                found.wrong.append(wrong)
            elif kind in ("plain", "schema") and answer.status == 200 and _sole(body):
                found.kept.append((body, answer.text))
            if outcome == "refused":
                await asyncio.sleep(0.2)

    async def watch() -> None:
        while time.monotonic() < end:
            await asyncio.sleep(min(5.0, seconds / 10))
            figures = await client.figures()
            if "outstride_engine_resident_memory_bytes" in figures:
                now = time.monotonic() - started
                found.memory.append((now, figures["outstride_engine_resident_memory_bytes"]))

    await asyncio.gather(watch(), *(one(number) for number in range(clients)))
    if found.asked != sum(found.outcomes.values()):
        found.wrong.append(f"{found.asked} asked, {sum(found.outcomes.values())} answered")
    await _compare(client, found, compare, random.Random(seed))
    await _leftovers(client, found)
    return found


def _sole(body: dict[str, Any]) -> bool:
    """Whether the answer of a request is determined."""
    entry, _ = registry.parse(body["outstride"]["method"])
    return body["n"] == 1 and entry.exactness is Exactness.EXACT


async def _compare(client: Client, found: SoakReport, count: int, numbers: random.Random) -> None:
    """Compares exact answers under load with answers of their baseline given alone."""
    for body, text in numbers.sample(found.kept, min(count, len(found.kept))):
        method = body["outstride"]["method"]
        baseline = {"outstride": {"method": registry.baseline(method)}}
        alone = await client.send(PATH, {**body, **baseline})
        found.compared += 1
        if alone.text != text:
            found.wrong.append(f"{method} answered {text!r} under load and {alone.text!r} alone")


async def _leftovers(client: Client, found: SoakReport) -> None:
    """Checks that nothing runs, no page is lost, the cache is consistent and memory has not grown."""
    figures = await client.figures()
    for name, wanted in (
        ("outstride_num_requests_in_flight", 0.0),
        ("outstride_num_requests_running", 0.0),
        ("outstride_num_requests_waiting", 0.0),
        ("outstride_kv_cache_consistent", 1.0),
        ("outstride_engine_restarts_total", 0.0),
        ("outstride_kv_cache_pages_free", figures.get("outstride_kv_cache_pages", 0.0)),
    ):
        if figures.get(name) != wanted:
            found.wrong.append(f"{name} is {figures.get(name)}, not {wanted}")
    late = [size for when, size in found.memory if when >= 60.0]
    if len(late) > 1 and late[-1] > 1.05 * late[0]:
        found.wrong.append(
            f"memory grew from {late[0]:.0f} to {late[-1]:.0f} bytes after minute one"
        )
