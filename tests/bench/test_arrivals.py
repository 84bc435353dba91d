"""Open-loop arrivals: the process itself, what counts as good, and quantiles that one can check."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from statistics import mean, variance
from typing import Any

import pytest

from outstride.bench.arrivals import Arrival, ArrivalReport, LatencyLimits, arrive, quantile, times
from outstride.bench.serve import StreamedResponse
from outstride.errors import InvalidParams


def test_arrivals_are_a_poisson_process() -> None:
    found = times(4.0, 4001, 7)
    gaps = [b - a for a, b in pairwise(found)]
    assert found[0] == 0.0
    assert mean(gaps) == pytest.approx(0.25, rel=0.06)
    assert variance(gaps) == pytest.approx(0.0625, rel=0.15), "exponential gaps vary as they should"
    counts = [sum(second <= t < second + 1 for t in found) for second in range(900)]
    assert variance(counts) / mean(counts) == pytest.approx(1.0, abs=0.15)


def test_a_seed_gives_the_same_arrivals() -> None:
    assert times(2.0, 20, 1) == times(2.0, 20, 1)
    assert times(2.0, 20, 1) != times(2.0, 20, 2)
    for rate, count in ((0.0, 1), (-1.0, 1), (1.0, 0)):
        with pytest.raises(InvalidParams):
            times(rate, count, 0)


def test_quantiles() -> None:
    values = [float(i) for i in range(1, 101)]
    assert quantile(values, 0.5) == 50
    assert quantile(values, 0.99) == 99
    assert quantile([3.0], 0.99) == 3.0
    assert quantile([], 0.5) is None


def request(**values: Any) -> Arrival:
    usual: dict[str, Any] = {
        "rate": 1.0,
        "at": 0.0,
        "late": 0.0,
        "status": 200,
        "tokens": 10,
        "ttft": 0.5,
        "itl": (0.1, 0.1),
        "seconds": 1.0,
        "error": "",
    }
    return Arrival(**{**usual, **values})


@pytest.mark.parametrize(
    ("values", "good"),
    [
        ({}, True),
        ({"ttft": 1.01}, False),
        ({"ttft": None}, False),
        ({"itl": (0.1, 0.21)}, False),
        ({"itl": ()}, True),
        ({"status": 429}, False),
        ({"error": "gone"}, False),
    ],
)
def test_what_is_good(values: dict[str, Any], good: bool) -> None:
    assert request(**values).good(LatencyLimits(1.0, 0.2)) is good


def test_goodput() -> None:
    report = ArrivalReport(LatencyLimits(1.0, 0.2))
    report.arrivals = [request(), request(ttft=5.0), request(status=500, tokens=0, ttft=None)]
    report.arrivals += [request(rate=2.0)]
    report.seconds = {1.0: 10.0}
    slow, quick = report.rates()
    assert (slow["requests"], slow["good"], slow["failed"]) == (3, 1, 1)
    assert slow["goodput"] == 0.1
    assert slow["good_tokens_per_second"] == 1.0
    assert slow["tokens_per_second"] == 2.0
    assert (slow["ttft_p50"], slow["ttft_p99"]) == (0.5, 5.0)
    assert quick["goodput"] == 1.0, "without an end, the last answer counts as one"
    assert len(report.samples()) == 4
    assert ArrivalReport(LatencyLimits()).summary()["rates"] == []


class Slow:
    """A server that takes one request at a time: clients that wait would never see its queue."""

    def __init__(self) -> None:
        self.waiting = asyncio.Lock()
        self.peak = self.now = 0

    async def send(self, path: str, body: dict[str, Any]) -> StreamedResponse:
        assert path == "/v1/chat/completions"
        assert body["stream"]
        self.now += 1
        self.peak = max(self.peak, self.now)
        async with self.waiting:
            await asyncio.sleep(0.03)
        self.now -= 1
        loop = time.perf_counter()
        return StreamedResponse(status=200, tokens=2, events=[loop, loop + 0.001], seconds=0.03)


def test_requests_do_not_wait_for_each_other() -> None:
    server, report, done = Slow(), ArrivalReport(LatencyLimits()), list[int]()

    async def run() -> None:
        await arrive(
            server,  # type: ignore[arg-type]
            "m",
            ["a", "b"],
            report,
            rate=200.0,
            count=20,
            tokens=2,
            done=lambda: done.append(1),
        )

    asyncio.run(run())
    assert len(report.arrivals) == len(done) == 20
    assert server.peak > 5
    firsts = [a.ttft for a in report.arrivals if a.ttft is not None]
    assert max(firsts) >= 10 * 0.03, "the queue is seen"
    assert report.seconds[200.0] >= 0.55
