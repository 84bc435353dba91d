"""Open-loop load: requests arrive whether or not earlier ones are complete.

Clients that wait for a response slow down together with a slow server and so hide its queue. Here
arrivals are a Poisson process of a given rate, seeded. A request is good if its time to first token
(TTFT) and every inter-token latency (ITL) stay within limits. Goodput is the number of good requests
per second.
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

from outstride.bench.serve import Client, StreamedResponse
from outstride.errors import InvalidParams


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """Largest latencies of a good request, in seconds."""

    ttft: float = 2.0
    itl: float = 0.2


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it arrived and what its client measured."""

    rate: float
    at: float
    late: float
    """Seconds between the planned and the actual time of sending. This delay is the client's, not
    the server's.
    """
    status: int
    tokens: int
    ttft: float | None
    """Seconds to the first chunk, or None if none came."""
    itl: tuple[float, ...]
    """Seconds between consecutive chunks."""
    seconds: float
    error: str

    def good(self, limits: LatencyLimits) -> bool:
        if self.status != 200 or self.error or self.ttft is None:
            return False
        return self.ttft <= limits.ttft and max(self.itl, default=0.0) <= limits.itl

    def to_dict(self) -> dict[str, Any]:
        return {
            "rate": self.rate,
            "at": round(self.at, 4),
            "late": round(self.late, 4),
            "status": self.status,
            "tokens": self.tokens,
            "ttft": None if self.ttft is None else round(self.ttft, 5),
            "itl": [round(seconds, 5) for seconds in self.itl],
            "seconds": round(self.seconds, 4),
            "error": self.error,
        }


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share of the values does not exceed; None for no values."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@dataclass(slots=True)
class ArrivalReport:
    """All requests of all rates."""

    limits: LatencyLimits
    arrivals: list[Arrival] = field(default_factory=list)
    seconds: dict[float, float] = field(default_factory=dict)
    """Seconds from the first arrival to the last response, by rate."""

    def samples(self) -> list[dict[str, Any]]:
        return [arrival.to_dict() for arrival in self.arrivals]

    def rates(self) -> list[dict[str, Any]]:
        """One summary per arrival rate."""
        found = []
        for rate in dict.fromkeys(arrival.rate for arrival in self.arrivals):
            mine = [arrival for arrival in self.arrivals if arrival.rate == rate]
            span = self.seconds.get(rate) or max(a.at + a.seconds for a in mine)
            firsts = [a.ttft for a in mine if a.ttft is not None]
            latencies = [seconds for a in mine for seconds in a.itl]
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
                    "ttft_p50": quantile(firsts, 0.5),
                    "ttft_p99": quantile(firsts, 0.99),
                    "itl_p50": quantile(latencies, 0.5),
                    "itl_p99": quantile(latencies, 0.99),
                    "latest": round(max(a.late for a in mine), 4),
                }
            )
        return found

    def summary(self) -> dict[str, Any]:
        return {
            "limits": {"ttft": self.limits.ttft, "itl": self.limits.itl},
            "rates": self.rates(),
        }


def times(rate: float, count: int, seed: int) -> list[float]:
    """Arrival times: the first at 0, exponential intervals between them."""
    if rate <= 0 or count < 1:
        raise InvalidParams("rates must be positive, and there must be at least one request")
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
    """Sends `count` requests at a rate and waits for all responses."""
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
        report.arrivals.append(_arrival(rate, at, sent - at, started + sent, seen))
        done()

    planned = enumerate(times(rate, count, seed))
    await asyncio.gather(*(one(number, at) for number, at in planned))
    report.seconds[rate] = time.perf_counter() - started


def _arrival(rate: float, at: float, late: float, sent: float, seen: StreamedResponse) -> Arrival:
    return Arrival(
        rate=rate,
        at=at,
        late=max(0.0, late),
        status=seen.status,
        tokens=seen.tokens,
        ttft=seen.events[0] - sent if seen.events else None,
        itl=tuple(now - last for last, now in pairwise(seen.events)),
        seconds=seen.seconds,
        error=seen.error,
    )
