"""Soaking a server: many clients for some minutes, doing what clients do, and a look at what is left.

Every request must have exactly one answer, of a kind that it deserved; afterwards nothing may run on,
no page be lost, memory not have grown, and answers given in the crowd must be those given alone.
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
from outstride.bench.serve import Client, Streamed
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
class Soaked:
    """What came of it."""

    asked: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """What should not have happened; empty if all went well."""
    kept: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)
    """(seconds, bytes that the engine held)."""
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
    """A kind of request, and one of that kind."""
    kind = numbers.choices(
        ("plain", "stream", "shape", "cancel", "malformed"), (30, 35, 15, 12, 8)
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
    if kind == "shape":
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


def _judge(kind: str, found: Streamed) -> tuple[str, str | None]:
    """How a request ended, and what is wrong with that."""
    outcome = f"{kind}: {found.finish or found.status}"
    if found.status == 429:
        return "refused", None
    if kind == "malformed":
        return outcome, None if found.status == 400 else f"malformed got {found.status}"
    if found.status != 200 or found.error:
        return outcome, f"{kind} got {found.status} {found.error} {found.text[:200]}"
    if kind == "shape" and found.finish == "stop":
        try:
            json.loads(found.text)
        except ValueError:
            return outcome, f"not JSON: {found.text!r}"
    if kind == "shape" and found.finish != "stop":
        return outcome, f"a shape was cut: {found.text!r}"
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
) -> Soaked:
    """Puts a server under load for a while and looks at what is left."""
    registry.discover()
    found, end = Soaked(), time.monotonic() + seconds
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
            elif kind in ("plain", "shape") and answer.status == 200 and _sole(body):
                found.kept.append((body, answer.text))
            if outcome == "refused":
                await asyncio.sleep(0.2)

    async def watch() -> None:
        while time.monotonic() < end:
            await asyncio.sleep(min(5.0, seconds / 10))
            figures = await client.figures()
            if "outstride_engine_rss" in figures:
                now = time.monotonic() - started
                found.memory.append((now, figures["outstride_engine_rss"]))

    await asyncio.gather(watch(), *(one(number) for number in range(clients)))
    if found.asked != sum(found.outcomes.values()):
        found.wrong.append(f"{found.asked} asked, {sum(found.outcomes.values())} answered")
    await _compare(client, found, compare, random.Random(seed))
    await _leftovers(client, found)
    return found


def _sole(body: dict[str, Any]) -> bool:
    """Whether there is one answer that a request must have."""
    entry, _ = registry.parse(body["outstride"]["method"])
    return body["n"] == 1 and entry.exactness is Exactness.EXACT


async def _compare(client: Client, found: Soaked, count: int, numbers: random.Random) -> None:
    """Exact answers given in the crowd against what they are exact to, given alone."""
    for body, text in numbers.sample(found.kept, min(count, len(found.kept))):
        method = body["outstride"]["method"]
        baseline = {"outstride": {"method": registry.baseline(method)}}
        alone = await client.send(PATH, {**body, **baseline})
        found.compared += 1
        if alone.text != text:
            found.wrong.append(f"{method} said {text!r} in company, {alone.text!r} alone")


async def _leftovers(client: Client, found: Soaked) -> None:
    """Nothing runs, no page is lost, the cache agrees with itself, memory has not grown."""
    figures = await client.figures()
    for name, wanted in (
        ("outstride_answers_open", 0.0),
        ("outstride_engine_running", 0.0),
        ("outstride_engine_waiting", 0.0),
        ("outstride_engine_intact", 1.0),
        ("outstride_engine_restarts_total", 0.0),
        ("outstride_engine_pages_free", figures.get("outstride_engine_pages", 0.0)),
    ):
        if figures.get(name) != wanted:
            found.wrong.append(f"{name} is {figures.get(name)}, not {wanted}")
    late = [size for when, size in found.memory if when >= 60.0]
    if len(late) > 1 and late[-1] > 1.05 * late[0]:
        found.wrong.append(
            f"memory grew from {late[0]:.0f} to {late[-1]:.0f} bytes after minute one"
        )
