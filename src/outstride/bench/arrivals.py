"""Open-loop load: requests come when they come, whether or not the last ones have been answered.

Clients that wait for their answer slow down with a slow server and so hide its queue. Here arrivals
are a Poisson process of a given rate, drawn from a seed. A request counts as good if its first token
and every gap between tokens stayed within limits; goodput is how many good ones come out per second.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from outstride.bench.serve import Client, Streamed
from outstride.errors import InvalidParams


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may take, in seconds, to be called good."""

    first: float = 2.0
    gap: float = 0.2


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it came, and what its client saw."""

    rate: float
    at: float
    late: float
    """How much later than planned it was sent: the client's own fault."""
    status: int
    tokens: int
    first: float | None
    """Seconds to the first chunk."""
    gaps: tuple[float, ...]
    seconds: float
    error: str

    def good(self, limits: Limits) -> bool:
        if self.status != 200 or self.error or self.first is None:
            return False
        return self.first <= limits.first and max(self.gaps, default=0.0) <= limits.gap

    def to_dict(self) -> dict[str, Any]:
        return {
            "rate": self.rate,
            "at": round(self.at, 4),
            "late": round(self.late, 4),
            "status": self.status,
            "tokens": self.tokens,
            "first": None if self.first is None else round(self.first, 5),
            "gaps": [round(gap, 5) for gap in self.gaps],
            "seconds": round(self.seconds, 4),
            "error": self.error,
        }


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share of them does not exceed."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@dataclass(slots=True)
class ArrivalReport:
    """All requests of all rates."""

    limits: Limits
    found: list[Arrival] = field(default_factory=list)
    spans: dict[float, float] = field(default_factory=dict)
    """Seconds from the first arrival to the last answer, by rate."""

    def samples(self) -> list[dict[str, Any]]:
        return [arrival.to_dict() for arrival in self.found]

    def rates(self) -> list[dict[str, Any]]:
        """What each rate did to the requests."""
        found = []
        for rate in dict.fromkeys(arrival.rate for arrival in self.found):
            mine = [arrival for arrival in self.found if arrival.rate == rate]
            span = self.spans.get(rate) or max(a.at + a.seconds for a in mine)
            firsts = [a.first for a in mine if a.first is not None]
            gaps = [gap for a in mine for gap in a.gaps]
            good = [a for a in mine if a.good(self.limits)]
            found.append(
                {
                    "rate": rate,
                    "requests": len(mine),
                    "failed": sum(a.status != 200 or bool(a.error) for a in mine),
                    "good": len(good),
                    "goodput": round(len(good) / span, 4),
                    "good_tokens_per_second": round(sum(a.tokens for a in good) / span, 2),
                    "tokens_per_second": round(sum(a.tokens for a in mine) / span, 2),
                    "first_p50": quantile(firsts, 0.5),
                    "first_p99": quantile(firsts, 0.99),
                    "gap_p50": quantile(gaps, 0.5),
                    "gap_p99": quantile(gaps, 0.99),
                    "latest": round(max(a.late for a in mine), 4),
                }
            )
        return found

    def summary(self) -> dict[str, Any]:
        return {
            "limits": {"first": self.limits.first, "gap": self.limits.gap},
            "rates": self.rates(),
        }


def times(rate: float, count: int, seed: int) -> list[float]:
    """When requests come: gaps between them are exponential, the first comes at once."""
    if rate <= 0 or count < 1:
        raise InvalidParams("rates must be positive, and at least one request must come")
    numbers = random.Random(f"{seed} {rate}")
    found, now = [], 0.0
    for _ in range(count):
        found.append(now)
        now += numbers.expovariate(rate)
    return found


async def arrive(
    client: Client,
    model: str,
    prompts: Sequence[str],
    report: ArrivalReport,
    *,
    rate: float,
    count: int,
    tokens: int,
    seed: int = 0,
    done: Callable[[], None] = lambda: None,
    **body: Any,
) -> None:
    """Sends `count` requests at a rate and waits for all of them."""
    started = time.perf_counter()

    async def one(number: int, at: float) -> None:
        await asyncio.sleep(max(0.0, started + at - time.perf_counter()))
        sent = time.perf_counter() - started
        values = {
            "model": model,
            "messages": [{"role": "user", "content": prompts[number % len(prompts)]}],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **body,
        }
        seen = await client.send("/v1/chat/completions", values)
        report.found.append(_arrival(rate, at, sent - at, started + sent, seen))
        done()

    planned = enumerate(times(rate, count, seed))
    await asyncio.gather(*(one(number, at) for number, at in planned))
    report.spans[rate] = time.perf_counter() - started


def _arrival(rate: float, at: float, late: float, sent: float, seen: Streamed) -> Arrival:
    return Arrival(
        rate=rate,
        at=at,
        late=max(0.0, late),
        status=seen.status,
        tokens=seen.tokens,
        first=seen.events[0] - sent if seen.events else None,
        gaps=tuple(now - last for last, now in pairwise(seen.events)),
        seconds=seen.seconds,
        error=seen.error,
    )
