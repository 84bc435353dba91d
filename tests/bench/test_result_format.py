"""The result format: complete, checked, and the same after a round trip through a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outstride.bench import result
from outstride.bench.result import BenchResult
from outstride.errors import OutstrideError


def some() -> BenchResult:
    return BenchResult("step", {"model": "toy"}).finish([{"nodes": 1}], {"best": 1.5})


def test_it_says_what_where_and_with_what() -> None:
    values = some().to_dict()
    assert list(values) == [
        *("kind", "machine", "versions", "commit", "settings"),
        *("samples", "summary", "complete", "started", "seconds"),
    ]
    assert set(values["machine"]) == {"cpu", "cores", "memory", "accelerator", "os"}
    assert values["machine"]["cores"] >= 1
    assert {"outstride", "python", "torch", "numpy"} <= set(values["versions"])
    assert values["seconds"] >= 0
    assert values["started"].endswith("+00:00")
    assert result.validate(values) == values


def test_one_line_of_json() -> None:
    text = some().to_json()
    assert "\n" not in text
    assert json.loads(text)["samples"] == [{"nodes": 1}]


def test_round_trip(tmp_path: Path) -> None:
    before = some()
    result.write(before, tmp_path / "result.json")
    assert result.read(tmp_path / "result.json").to_dict() == before.to_dict()
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": None}, "'kind' is of type NoneType"),
        ({"seconds": True}, "'seconds' is of type bool"),
        ({"complete": 1}, "'complete' is of type int"),
        ({"samples": [1]}, "samples must be objects"),
        ({"machine": {}}, "machine lacks 'cpu'"),
        ({"extra": 1}, "unknown field 'extra'"),
    ],
)
def test_what_is_no_result_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(OutstrideError, match=said):
        result.validate({**some().to_dict(), **change})


def test_missing_field_and_wrong_type() -> None:
    values = some().to_dict()
    del values["commit"]
    with pytest.raises(OutstrideError, match="'commit' is missing"):
        result.validate(values)
    with pytest.raises(OutstrideError, match="not list"):
        result.validate([])


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(OutstrideError, match="not JSON"):
        result.read(tmp_path / "bad.json")


def test_commit_is_none_outside_of_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result, "__file__", str(tmp_path / "result.py"))
    assert result.commit() is None
