"""What counts as worse: any drop of a count, a drop of a ratio beyond the tolerance, nothing else."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from outstride.bench import regress, result
from outstride.bench.regress import RegressReport, compare, compare_paths, figures
from outstride.bench.result import BenchResult
from outstride.errors import InvalidParams, OutstrideError
from tests.cli.shell import Shell


def line(method: str, group: str, **values: float) -> dict[str, Any]:
    usual = {"tokens_per_pass": 2.0, "equal": 4, "prompts": 4, "ratio": 1.5}
    place = {"method": method, "group": group, "batch": 1, "temperature": 0.0, "warm": False}
    return {**place, **usual, **values}


def decode(*, frozen: bool = True, cost: Any = None, **values: float) -> BenchResult:
    settings = {"model": "toy", "frozen": frozen, "cost": cost or {"1": 0.006}}
    lines = [line("plain", "all", tokens_per_pass=1.0, ratio=1.0), line("auto", "all", **values)]
    return BenchResult("decode", settings).finish([{"x": 1}], {"lines": lines})


def worse(old: BenchResult, new: BenchResult, tolerance: float = 0.05) -> list[str]:
    return [c.name.split(",")[0] for c in compare(old, new, RegressReport(tolerance)).worse]


def test_the_same_twice_is_no_worse() -> None:
    report = compare(decode(), decode(), RegressReport(0.0))
    assert report.worse == []
    assert len(report.changes) == 5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens_per_pass": 1.9999}, ["tokens per pass"]),
        ({"tokens_per_pass": 2.1}, []),
        ({"equal": 3}, ["equal answers"]),
        ({"ratio": 1.43}, []),
        ({"ratio": 1.42}, ["speed against plain"]),
        ({"ratio": 3.0}, []),
    ],
)
def test_drops_of_a_decode(change: dict[str, Any], said: list[str]) -> None:
    assert worse(decode(), decode(**change)) == said


def test_without_a_frozen_curve_drafts_may_vary() -> None:
    loose = {"frozen": False}
    assert worse(decode(**loose), decode(tokens_per_pass=1.95, **loose)) == []
    assert worse(decode(**loose), decode(tokens_per_pass=1.85, **loose)) == ["tokens per pass"]
    other = decode(cost={"1": 0.007}, tokens_per_pass=1.95)
    assert worse(decode(), other) == [], "another curve, other drafts"


def test_what_went_missing_is_worse() -> None:
    new = decode()
    new.summary["lines"].pop()
    assert len(worse(decode(), new)) == 3


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "parallel": (
        {"policies": [{"policy": "factor", "tokens_per_pass": 3.0, "match": 90.0}]},
        {"policies": [{"policy": "factor", "tokens_per_pass": 3.0, "match": 89.9}]},
    ),
    "quality": (
        {"scores": [{"method": "m", "task": "t", "score": 50.0, "tokens_per_pass": 2.0}]},
        {"scores": [{"method": "m", "task": "t", "score": 50.0, "tokens_per_pass": 1.9}]},
    ),
    "peers": (
        {"first_against": {"b": {"1": 2.0}}, "milliseconds": {"a": {"8": 10.0}, "b": {"8": 50.0}}},
        {"first_against": {"b": {"1": 2.0}}, "milliseconds": {"a": {"8": 12.0}, "b": {"8": 50.0}}},
    ),
    "step": (
        {"milliseconds": {"nodes": {"1": 5.0, "8": 10.0}}},
        {"milliseconds": {"nodes": {"1": 5.0, "8": 11.0}}},
    ),
    "serve": ({"ratio": 2.0, "failed": 0}, {"ratio": 2.0, "failed": 1}),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_kinds(kind: str) -> None:
    old, new = (BenchResult(kind, {}).finish([], summary) for summary in OTHERS[kind])
    assert worse(old, copy.deepcopy(old)) == []
    assert len(worse(old, new)) == 1


def test_slower_machines_are_not_worse() -> None:
    """Times themselves do not count, only their ratios."""
    old, new = (
        BenchResult("step", {}).finish([], {"milliseconds": {"nodes": {"1": a, "8": 2 * a}}})
        for a in (5.0, 50.0)
    )
    assert worse(old, new, 0.0) == []


def test_rows_against_llama_cpp() -> None:
    def made(passes: float, rate: float) -> BenchResult:
        rows: list[dict[str, Any]] = [
            {"name": "pass", "unit": "ms", "ratio": passes},
            {"name": "rate", "unit": "tok/s", "ratio": rate},
            {"name": "start", "unit": "s", "ratio": None},
        ]
        return BenchResult("against", {}).finish(rows, {})

    assert worse(made(0.5, 2.0), made(0.52, 1.95)) == []
    assert worse(made(0.5, 2.0), made(0.6, 2.0)) == ["pass"]
    assert worse(made(0.5, 2.0), made(0.5, 1.8)) == ["rate"]


def test_what_cannot_be_compared() -> None:
    other = decode()
    other.settings["model"] = "other"
    with pytest.raises(InvalidParams, match="differ in 'model'"):
        compare(decode(), other, RegressReport(0.0))
    short = decode()
    short.complete = False
    with pytest.raises(InvalidParams, match="new result is incomplete"):
        compare(decode(), short, RegressReport(0.0))
    with pytest.raises(InvalidParams, match="bench decode and one of bench step"):
        compare(decode(), BenchResult("step", {}), RegressReport(0.0))
    with pytest.raises(InvalidParams, match="no figures"):
        figures(BenchResult("fidelity", {}))


def test_every_kind_names_its_settings() -> None:
    assert set(regress._SAME) == set(regress._READERS)


def test_the_command(shell: Shell, tmp_path: Path) -> None:
    old, new, bad = tmp_path / "old.json", tmp_path / "new.json", tmp_path / "bad.json"
    result.write(decode(), old)
    result.write(decode(ratio=1.48), new)
    result.write(decode(tokens_per_pass=1.5), bad)
    ran = shell("bench", "regress", str(old), str(new))
    assert (ran.code, ran.last) == (0, "5 figures compared, 0 worse")
    assert shell("bench", "regress", str(old), str(new), "--tolerance", "0.01").code == 1
    ran = shell("bench", "regress", str(old), str(bad))
    assert ran.code == 1
    assert "worse: tokens per pass, auto" in ran.out
    assert "2 before, 1.5 now (exact)" in " ".join(ran.out.split())
    ran = shell("bench", "regress", str(old), str(bad), "--json")
    assert ran.code == 1
    assert len(json.loads(ran.out)["worse"]) == 1
    assert shell("bench", "regress", str(old), str(tmp_path / "none.json")).code == 1


def test_folders(tmp_path: Path) -> None:
    for name, ratio in (("old", 1.5), ("new", 1.0)):
        result.write(decode(ratio=ratio), tmp_path / name / "decode.json")
        result.write(BenchResult("fidelity", {}).finish([], {}), tmp_path / name / "f.json")
    report = compare_paths(tmp_path / "old", tmp_path / "new")
    assert [change.name for change in report.worse] == [
        "decode: speed against plain, auto, all, 1 at a time, temperature 0"
    ]
    (tmp_path / "new" / "decode.json").unlink()
    with pytest.raises(OutstrideError, match="is missing"):
        compare_paths(tmp_path / "old", tmp_path / "new")
    with pytest.raises(InvalidParams, match="between 0 and 1"):
        compare_paths(tmp_path, tmp_path, 1.5)
