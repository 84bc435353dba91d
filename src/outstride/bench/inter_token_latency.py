"""Inter-token latency (ITL) of running requests while the long prompt of another request is
prefilled.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from outstride.bench.serve import Client, StreamedResponse
from outstride.errors import OutstrideError

PRIORITY = 50
"""Real-time priority of the client."""
Series = Sequence[tuple[float, float]]
"""(time, ITL) of one request, in order; the long prompt arrives at time 0."""


@dataclass(frozen=True, slots=True)
class InterTokenLatency:
    """Seconds between chunks of running requests, before and during the prefill of a long prompt.

    Each request is compared with the median of its own ITL in the second half of the time before the
    prompt arrived. Answers grow during the prefill, and with them each pass, prompt or not. So
    latencies are also compared with a baseline that grows on a straight line from the median before
    to the median after (`_grown`).
    """

    median: float
    """Median over requests of their median ITL before the prompt."""
    median_after: float
    """Median of all ITL after the prompt's first token."""
    max_before: float
    """Largest ITL just before the prompt: the noise of the machine."""
    max: float
    """Largest ITL during the prefill."""
    max_ratio: float
    """Largest ratio of an ITL during the prefill to the median of its request."""
    p95_ratio: float
    """95th percentile of these ratios."""
    share_over_3: float
    """Share of these ratios above 3."""
    max_ratio_grown: float
    """Largest ratio to the growing baseline."""
    p95_ratio_grown: float
    """95th percentile of the ratios to the growing baseline."""
    series: list[tuple[float, float]]
    """(time, ITL) of all requests, for a plot."""
    ttft: float
    """Time to first token of the long prompt."""
    client_priority: bool
    """Whether the client ran at real-time priority. If not, its own waiting for a core is included."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "median_itl_ms": round(1e3 * self.median, 1),
            "median_itl_after_ms": round(1e3 * self.median_after, 1),
            "max_itl_before_ms": round(1e3 * self.max_before, 1),
            "max_itl_ms": round(1e3 * self.max, 1),
            "ratio": round(self.max_ratio, 2),
            "ratio_95": round(self.p95_ratio, 2),
            "share_over_3": round(self.share_over_3, 5),
            "ratio_grown": round(self.max_ratio_grown, 2),
            "ratio_grown_95": round(self.p95_ratio_grown, 2),
            "long_prompt_ttft_s": round(self.ttft, 2),
            "client_priority": self.client_priority,
        }


async def measure(
    client: Client,
    model: str,
    *,
    running: int = 8,
    words: int = 3000,
    warm: float = 2.5,
    tokens: int = 1500,
    method: str = "plain",
) -> InterTokenLatency:
    """Running requests decode for `warm` seconds with a method; then a long prompt arrives."""
    salt = str(time.time())
    end = math.inf

    def body(content: str, tokens: int) -> dict[str, Any]:
        return {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "cache_salt": salt,  # a prompt that was read before would not be read again
            # with its trace, a token is reported even if its text is held back as half a character
            "outstride": {"method": method, "trace": True},
        }

    async def decode(number: int) -> StreamedResponse:
        content = f"Tell me about the number {number}."
        return await client.send(path, body(content, tokens), until=lambda: end, timed=True)

    path = "/v1/chat/completions"
    numbers = random.Random(0)
    text = " ".join(numbers.choice(("red", "green", "blue", "dog", "cat")) for _ in range(words))
    gc.freeze()  # the client's own pauses would count as the server's
    with _real_time_priority() as first:
        requests = [asyncio.create_task(decode(i)) for i in range(running)]
        await asyncio.sleep(warm)
        arrived = time.perf_counter()
        long = await client.send(path, body(text, 2), timed=True)
        answered = long.events[0] if long.events else time.perf_counter()
        end = time.perf_counter() + 0.6 * warm
        done = await asyncio.gather(*requests)
    every = [[(now - arrived, now - last) for last, now in pairwise(t.events)] for t in done]
    error = next(
        (decode.error or decode.text for decode in done if decode.status != 200), "too few tokens"
    )
    return compare(every, answered - arrived, error, client_priority=first)


@contextlib.contextmanager
def _real_time_priority() -> Iterator[bool]:
    """Gives this process real-time priority if permitted: it shares cores with the server that it
    measures.
    """
    try:
        policy, middle = os.sched_getscheduler(0), os.sched_getparam(0)
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    except (AttributeError, OSError):
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, policy, middle)


def compare(
    every: Sequence[Series], ttft: float, error: str, *, client_priority: bool = True
) -> InterTokenLatency:
    """Compares the ITL of each request during the prefill with its own median before."""
    usuals, before, during = [], [], []
    after = [itl for series in every for when, itl in series if when - itl > ttft]
    for series in every:
        early = [itl for when, itl in series if when < 0]
        early = early[len(early) // 2 :]  # when the prompt arrived, not when they began
        if early:
            usuals.append(median(early))
            before += early
            during += [
                (when, itl, usuals[-1]) for when, itl in series if when >= 0 and when - itl <= ttft
            ]
    if not before or not during:
        raise OutstrideError(f"the server gave nothing to measure: {error}")
    middle = median(usuals)
    grown = max(median(after) / middle, 1.0) if after else 1.0
    ratios = sorted(itl / own for _, itl, own in during)
    then = sorted(
        itl / (own * (1.0 + (grown - 1.0) * min(when / ttft, 1.0))) for when, itl, own in during
    )
    place = int(0.95 * len(during))
    return InterTokenLatency(
        median=middle,
        median_after=grown * middle,
        max_before=max(before),
        max=max(itl for _, itl, _ in during),
        max_ratio=ratios[-1],
        p95_ratio=ratios[place],
        share_over_3=sum(ratio > 3 for ratio in ratios) / len(ratios),
        max_ratio_grown=then[-1],
        p95_ratio_grown=then[place],
        series=sorted(entry for series in every for entry in series),
        ttft=ttft,
        client_priority=client_priority,
    )


def plot(found: InterTokenLatency, *, width: int = 720, height: int = 240) -> str:
    """The latencies over time as an SVG."""
    left = min(when for when, _ in found.series)
    right = max(when for when, _ in found.series)
    top = max(max(itl for _, itl in found.series), 3.2 * found.median)

    def x(when: float) -> float:
        return 50 + (width - 60) * (when - left) / (right - left)

    def y(itl: float) -> float:
        return height - 30 - (height - 50) * itl / top

    dots = "".join(
        f'<circle cx="{x(when):.1f}" cy="{y(itl):.1f}" r="1.5"/>' for when, itl in found.series
    )
    bound = y(3 * found.median)
    ends = "".join(
        f'<text x="{place}" y="{y(itl):.1f}">{1e3 * itl:.0f} ms</text>'
        for place, itl in ((4, found.median), (4, top))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">'
        f'<rect x="{x(0):.1f}" y="20" width="{x(found.ttft) - x(0):.1f}" '
        f'height="{height - 50}" fill="#ddd"/><g fill="#36c">{dots}</g>'
        f'<path d="M{x(left):.1f} {bound:.1f}H{x(right):.1f}" stroke="#c33" fill="none"/>'
        f'<text x="52" y="{bound - 4:.1f}" fill="#c33">3 x the usual gap before the prompt</text>'
        f'<text x="{x(0) + 3:.1f}" y="32">a long prompt is read</text>{ends}</svg>'
    )
