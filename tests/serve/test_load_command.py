"""`outstride bench serve` against a real server: arrivals, gaps with their plot, and a soak."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from outstride.bench import inter_token_latency as measured
from outstride.bench import soak as soaked
from outstride.bench.decode import exact_methods
from outstride.bench.result import read, validate
from outstride.cli import main
from tests.serve.running import Running

FEW = ["--limit", "3", "--clients", "2", "--tokens", "6"]


def bench(server: Running, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, object]:
    code = main(["bench", "serve", "--url", server.url, "--model", "tiny", *FEW, *options])
    assert code == 0
    return validate(json.loads(capsys.readouterr().out.splitlines()[-1]))


def test_arrivals(server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "serve.json"
    options = ("--rate", "20,40", "--requests", "6", "--seed", "3", "--ttft-limit", "60000")
    values = bench(server, capsys, *options, "--itl-limit", "60000", "--out", str(out))
    kept = read(out)
    assert kept.to_dict() == values
    assert kept.complete
    assert kept.settings["seed"] == 3
    rates = kept.summary["arrivals"]["rates"]
    assert [(row["rate"], row["requests"], row["good"]) for row in rates] == [
        *((20.0, 6, 6), (40.0, 6, 6))
    ]
    assert all(row["ttft_p99"] >= row["ttft_p50"] > 0 for row in rates)
    assert all(row["goodput"] > 0 for row in rates)
    arrivals = [sample for sample in kept.samples if sample["what"] == "arrival"]
    assert len(arrivals) == 12
    assert {sample["status"] for sample in arrivals} == {200}


def test_itl_and_its_plot(
    server: Running,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = measured.measure
    small: Any = {"running": 3, "words": 300, "warm": 0.3, "tokens": 600}
    asked: list[str] = []

    def shorter(client: Any, model: str, *, method: str) -> Any:
        asked.append(method)
        return usual(client, model, method=method, **small)

    monkeypatch.setattr(measured, "measure", shorter)
    plot = tmp_path / "gaps.svg"
    bench(server, capsys, "--itl")
    values = bench(server, capsys, "--itl", "auto", "--rounds", "3", "--plot", str(plot))
    assert asked == ["plain", "auto", "auto", "auto"]
    summary = validate(values)["summary"]["itl"]
    assert summary["ratio"] == sorted(summary["ratios"])[1]
    assert summary["max_itl_ms"] >= summary["median_itl_ms"] > 0
    assert summary["ratio"] >= 1
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")


def test_a_soak(
    server: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = soaked.soak
    asked: list[list[str]] = []

    def small(client: object, model: str, *, methods: list[str], seconds: float) -> object:
        asked.append(methods)
        return usual(client, model, methods=methods, seconds=seconds, clients=6, compare=5)  # type: ignore[arg-type]

    monkeypatch.setattr(soaked, "soak", small)
    values = bench(server, capsys, "--soak", "2")
    summary = validate(values)["summary"]["soak"]
    assert summary["wrong"] == []
    assert summary["asked"] == summary["answered"] > 5
    assert asked == [exact_methods()]
    assert {"plain", "auto", "ngram", "suffix"} <= set(asked[0])


def test_a_soak_that_goes_wrong_fails(
    server: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object, **__: object) -> soaked.SoakReport:
        return soaked.SoakReport(asked=1, wrong=["a request was lost"])

    monkeypatch.setattr(soaked, "soak", broken)
    code = main(
        ["bench", "serve", "--url", server.url, "--model", "tiny", *FEW, "--soak", "1", "--json"]
    )
    assert code == 1
    assert "a request was lost" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [("--rate", "0"), ("--requests", "0"), ("--ttft-limit", "-1"), ("--soak", "-1")],
)
def test_nonsense_is_refused(options: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *options]) == 1
    assert "must be positive" in capsys.readouterr().err


def test_a_killed_engine(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    before = server.engine()
    values = bench(server, capsys, "--kill", str(server.process.pid))
    found = validate(values)["summary"]["kill"]
    assert server.engine() != before
    assert found["serves_again"]
    assert found["silent"] == 0
    assert sum(found["outcomes"].values()) == found["clients"] == 16
    assert set(found["outcomes"]) <= {"answered", "error"}
    assert 0 < found["all_answered_s"] < found["ready_again_s"]


def test_a_process_without_an_engine_is_refused(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "serve", "--url", server.url, "--model", "tiny", *FEW]
    assert main([*words, "--kill", str(server.engine())]) != 0
    assert "give the process id of `outstride serve`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new"),
    [("--gaps", "--itl"), ("--first-limit", "--ttft-limit"), ("--gap-limit", "--itl-limit")],
)
def test_an_old_option_names_the_new_one(
    capsys: pytest.CaptureFixture[str], old: str, new: str
) -> None:
    for value in ([], ["5"]):
        assert main(["bench", "serve", old, *value]) == 2
        assert f"{old} is now called {new}" in capsys.readouterr().err
    assert main(["bench", "serve", "--help"]) == 0
    assert f"{old} " not in capsys.readouterr().out
