"""The measuring commands against a real server: a short soak, and figures that add up."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from outstride.bench.inter_token_latency import compare, measure, plot
from outstride.bench.result import validate
from outstride.bench.serve import Client, StreamedResponse, load, outside_steps
from outstride.bench.soak import _judge, soak
from outstride.cli import main
from outstride.errors import OutstrideError
from tests.serve import tiny
from tests.serve.running import Running, free_port, start

METHODS = (
    "plain",
    "auto",
    "ngram",
    "suffix",
    "mix",
    "steps",
    "verify",
    "threshold",
    "self-diffuse",
)


def test_a_short_soak_leaves_nothing_behind(tmp_path: Path) -> None:
    """On a model that both continues texts and fills in masks: methods of both kinds side by side."""
    with start(tiny.make_masked(tmp_path / "masked"), tmp_path / "log") as running:
        client = Client(running.url)
        for seconds in (
            6.0,
            30.0,
            120.0,
            480.0,
        ):  # a busy machine needs longer for as many requests
            found = asyncio.run(
                soak(client, "tiny", methods=METHODS, clients=12, seconds=seconds, compare=25)
            )
            if found.asked > 30 and found.compared >= 15:
                break
    assert found.wrong == []
    assert found.asked > 30
    assert found.compared >= 15
    kinds = {outcome.split(":")[0] for outcome in found.outcomes}
    assert {"plain", "stream", "schema", "malformed"} <= kinds


def test_load_and_gaps(server: Running) -> None:
    client = Client(server.url)

    async def both() -> None:
        found = await load(client, "tiny", ["one", "two", "three"] * 4, clients=4, tokens=24)
        assert (found.requests, found.failed) == (12, 0)
        assert 0 < found.tokens <= 12 * 24
        assert found.chunks <= found.tokens + 12  # one per pass, and the usage
        assert found.outside is not None
        assert 0.0 < found.outside < 1.0
        waited = await measure(client, "tiny", running=3, words=300, warm=0.3, tokens=600)
        assert waited.median > 0
        assert waited.max >= waited.median
        assert plot(waited).startswith("<svg")

    asyncio.run(both())


def test_a_gap_is_held_against_what_was_usual_for_its_own_request() -> None:
    """One request has a gap of 10 ms and the other of 20; passes take half as long again in the end."""
    quick = [(-0.1 + 0.01 * i, 0.01) for i in range(10)]
    slow = [(-0.2 + 0.02 * i, 0.02) for i in range(10)]
    quick += [(0.02, 0.02), (0.065, 0.045), (0.095, 0.03), (0.15, 0.015), (0.165, 0.015)]
    slow += [(0.04, 0.04), (0.1, 0.06), (0.15, 0.03), (0.18, 0.03)]
    found = compare([quick, slow], 0.1, "")
    assert found.median == pytest.approx(0.015)
    assert found.max == 0.06
    assert found.max_ratio == pytest.approx(
        4.5
    )  # not 0.06 against 0.015, and not against what came later
    assert found.share_over_3 == pytest.approx(1 / 5)
    assert found.median_after == pytest.approx(0.0225)
    assert found.max_ratio_grown == pytest.approx(4.5 / 1.325)
    with pytest.raises(OutstrideError, match="too few"):
        compare([[(1.0, 0.1)]], 2.0, "too few")


def test_processor_time_outside_steps() -> None:
    before = {
        "outstride_engine_cpu_seconds_total": 5.0,
        "outstride_http_cpu_seconds_total": 1.0,
        "outstride_engine_step_cpu_seconds_total": 4.0,
    }
    after = {
        "outstride_engine_cpu_seconds_total": 14.5,
        "outstride_http_cpu_seconds_total": 1.5,
        "outstride_engine_step_cpu_seconds_total": 13.0,
    }
    assert outside_steps(before, after) == pytest.approx(0.1)
    assert outside_steps({}, after) is None


def test_what_is_wrong_is_seen() -> None:
    good = StreamedResponse(status=200, finish="stop", text="{}")
    assert _judge("schema", good)[1] is None
    assert _judge("malformed", good)[1]
    assert _judge("plain", StreamedResponse(status=500))[1]
    assert _judge("stream", StreamedResponse(status=200, finish=None))[1]
    assert _judge("stream", StreamedResponse(status=200, finish="stop", error="gone"))[1]
    assert _judge("schema", StreamedResponse(status=200, finish="stop", text="{"))[1]
    assert _judge("schema", StreamedResponse(status=200, finish="length", text="{"))[1]
    assert _judge("plain", StreamedResponse(status=429))[1] is None


def test_a_server_without_figures_has_none(server: Running) -> None:
    found = asyncio.run(Client(server.url).send("/nowhere"))
    assert found.status == httpx.codes.NOT_FOUND
    gone = asyncio.run(Client(f"http://127.0.0.1:{free_port()}").send("/health"))
    assert gone.error


def test_the_command(server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = ["--against", f"{server.url}/", "--limit", "3", "--clients", "2", "--tokens", "6"]
    result, drawing = tmp_path / "result.json", tmp_path / "gaps.svg"
    code = main(
        ["bench", "serve", "--url", server.url, "--model", "tiny", *other, "--out", str(result)]
    )
    assert code == 0
    values = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert validate(values)["summary"]["ratio"] > 0
    assert values == json.loads(result.read_text())
    assert values["summary"]["cpu_outside_steps"] > 0
    assert not drawing.exists()
    assert main(["bench", "serve", "--url", f"http://127.0.0.1:{free_port()}"]) == 1
    assert "answered nothing" in capsys.readouterr().err
    assert main(["bench", "serve", "--clients", "0"]) == 1
