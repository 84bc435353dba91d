"""Gaps between tokens of those who talk, while somebody else's long prompt is read."""

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

from outstride.bench.serve import Client, Streamed
from outstride.errors import OutstrideError

PRIORITY = 50
"""The client's own, among those of real time."""
Series = Sequence[tuple[float, float]]
"""(when, gap) of one request, in order; the prompt arrives at 0."""


@dataclass(frozen=True, slots=True)
class Gaps:
    """Seconds between chunks of running requests, without and with a long prompt in between.

    What is usual for a request is the median of its own gaps in the second half of the time before the
    prompt arrived. Answers grow while it is read, and with them each pass, prompt or not: for
    comparison, gaps are also held against what was usual at their time, on a straight line from the
    median before to that afterwards.
    """

    usual: float
    """The median of what is usual for the requests."""
    after: float
    """The median of all gaps once the prompt was answered."""
    before: float
    """The longest just before it arrived: what else the machine does."""
    longest: float
    """The longest while it was read."""
    ratio: float
    """How many times its request's usual gap the worst was while the prompt was read."""
    most: float
    """Below so many times its usual stayed 95 of 100 of them."""
    late: float
    """The share of them that were longer than 3 times the usual."""
    ratio_then: float
    """The worst against what was usual at its time."""
    most_then: float
    """And what 95 of 100 stayed below."""
    series: list[tuple[float, float]]
    """(when, gap) of all, for a plot."""
    answered: float
    """When the prompt was answered."""
    first: bool
    """Whether the client went before all others on its machine: else its own waiting is in it."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "usual_gap_ms": round(1e3 * self.usual, 1),
            "usual_gap_after_ms": round(1e3 * self.after, 1),
            "longest_gap_before_ms": round(1e3 * self.before, 1),
            "longest_gap_ms": round(1e3 * self.longest, 1),
            "ratio": round(self.ratio, 2),
            "ratio_95": round(self.most, 2),
            "share_over_3": round(self.late, 5),
            "ratio_then": round(self.ratio_then, 2),
            "ratio_then_95": round(self.most_then, 2),
            "long_prompt_first_token_s": round(self.answered, 2),
            "client_first": self.first,
        }


async def gaps(
    client: Client,
    model: str,
    *,
    running: int = 8,
    words: int = 3000,
    warm: float = 2.5,
    tokens: int = 1500,
    method: str = "plain",
) -> Gaps:
    """Running requests decode for `warm` seconds, with a method; then a long prompt comes."""
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
            # with its trace, a token is told even if its text is held back as half a character
            "outstride": {"method": method, "trace": True},
        }

    async def talk(number: int) -> Streamed:
        content = f"Tell me about the number {number}."
        return await client.send(path, body(content, tokens), until=lambda: end, timed=True)

    path = "/v1/chat/completions"
    numbers = random.Random(0)
    text = " ".join(numbers.choice(("red", "green", "blue", "dog", "cat")) for _ in range(words))
    gc.freeze()  # the client's own pauses would count as the server's
    with _ahead() as first:
        talks = [asyncio.create_task(talk(i)) for i in range(running)]
        await asyncio.sleep(warm)
        arrived = time.perf_counter()
        long = await client.send(path, body(text, 2), timed=True)
        answered = long.events[0] if long.events else time.perf_counter()
        end = time.perf_counter() + 0.6 * warm
        done = await asyncio.gather(*talks)
    every = [[(now - arrived, now - last) for last, now in pairwise(t.events)] for t in done]
    said = next((talk.error or talk.text for talk in done if talk.status != 200), "too few tokens")
    return compare(every, answered - arrived, said, first=first)


@contextlib.contextmanager
def _ahead() -> Iterator[bool]:
    """Puts this process before those that it measures, if it may: it shares processors with them."""
    try:
        policy, usual = os.sched_getscheduler(0), os.sched_getparam(0)
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    except (AttributeError, OSError):
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, policy, usual)


def compare(every: Sequence[Series], answered: float, said: str, *, first: bool = True) -> Gaps:
    """The gaps of each request while the prompt was read against what is usual for it."""
    usuals, before, during = [], [], []
    after = [gap for series in every for when, gap in series if when - gap > answered]
    for series in every:
        early = [gap for when, gap in series if when < 0]
        early = early[len(early) // 2 :]  # when the prompt arrived, not when they began
        if early:
            usuals.append(median(early))
            before += early
            during += [
                (when, gap, usuals[-1])
                for when, gap in series
                if when >= 0 and when - gap <= answered
            ]
    if not before or not during:
        raise OutstrideError(f"the server gave nothing to measure: {said}")
    usual = median(usuals)
    grown = max(median(after) / usual, 1.0) if after else 1.0
    ratios = sorted(gap / own for _, gap, own in during)
    then = sorted(
        gap / (own * (1.0 + (grown - 1.0) * min(when / answered, 1.0))) for when, gap, own in during
    )
    place = int(0.95 * len(during))
    return Gaps(
        usual=usual,
        after=grown * usual,
        before=max(before),
        longest=max(gap for _, gap, _ in during),
        ratio=ratios[-1],
        most=ratios[place],
        late=sum(ratio > 3 for ratio in ratios) / len(ratios),
        ratio_then=then[-1],
        most_then=then[place],
        series=sorted(entry for series in every for entry in series),
        answered=answered,
        first=first,
    )


def plot(found: Gaps, *, width: int = 720, height: int = 240) -> str:
    """The gaps over time as an SVG."""
    left = min(when for when, _ in found.series)
    right = max(when for when, _ in found.series)
    top = max(max(gap for _, gap in found.series), 3.2 * found.usual)

    def x(when: float) -> float:
        return 50 + (width - 60) * (when - left) / (right - left)

    def y(gap: float) -> float:
        return height - 30 - (height - 50) * gap / top

    dots = "".join(
        f'<circle cx="{x(when):.1f}" cy="{y(gap):.1f}" r="1.5"/>' for when, gap in found.series
    )
    bound = y(3 * found.usual)
    ends = "".join(
        f'<text x="{place}" y="{y(gap):.1f}">{1e3 * gap:.0f} ms</text>'
        for place, gap in ((4, found.usual), (4, top))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">'
        f'<rect x="{x(0):.1f}" y="20" width="{x(found.answered) - x(0):.1f}" '
        f'height="{height - 50}" fill="#ddd"/><g fill="#36c">{dots}</g>'
        f'<path d="M{x(left):.1f} {bound:.1f}H{x(right):.1f}" stroke="#c33" fill="none"/>'
        f'<text x="52" y="{bound - 4:.1f}" fill="#c33">3 x the usual gap before the prompt</text>'
        f'<text x="{x(0) + 3:.1f}" y="32">a long prompt is read</text>{ends}</svg>'
    )
