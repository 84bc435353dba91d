"""`outstride bench step` and `outstride bench decode`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outstride.bench import result
from tests.cli.shell import Shell

STEP = ("bench", "step", "--nodes", "1,2,4", "--cached", "8", "--lengths", "0,16", "--repeat", "2")


def test_step_ends_with_one_json_object(shell: Shell, tmp_path: Path) -> None:
    ran = shell(*STEP, "--sequences", "1,3", "--out", str(tmp_path / "step.json"))
    assert ran.code == 0
    values = result.validate(json.loads(ran.last))
    assert values["kind"] == "step"
    assert values["settings"]["model"] == "smollm2"
    assert list(values["summary"]["milliseconds"]["nodes"]) == ["1", "2", "4"]
    assert list(values["summary"]["milliseconds"]["cached"]) == ["0", "16"]
    assert list(values["summary"]["milliseconds"]["sequences"]) == ["1", "3"]
    assert "after 8 cached tokens" in ran.out
    assert result.read(tmp_path / "step.json").to_dict() == values


def test_step_for_programs(shell: Shell) -> None:
    ran = shell(*STEP, "--model", "other", "--json")
    assert len(ran.out.splitlines()) == 1
    assert json.loads(ran.out)["settings"]["model"] == "other"


def test_step_says_what_it_left_out(shell: Shell) -> None:
    ran = shell("bench", "step", "--nodes", "1", "--lengths", "99999", "--repeat", "1")
    assert "left out: cached 99999: the model's context holds 512" in ran.out
    assert json.loads(ran.last)["summary"]["skipped"][0]["cached"] == 99999


@pytest.mark.parametrize("option", ["--nodes=0", "--cached=-1", "--repeat=0"])
def test_step_refuses_nonsense(shell: Shell, option: str) -> None:
    ran = shell("bench", "step", option)
    assert ran.code == 1
    assert ran.err.startswith("error: ")


def test_decode_compares_methods_and_ends_in_json(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("abcabc\nhello hello\n")
    options = ("--methods", "auto ngram", "--prompts", str(file), "--max-tokens", "6", "--warm")
    ran = shell("bench", "decode", *options)
    assert ran.code == 0
    values = json.loads(ran.last)
    assert values["kind"] == "decode"
    assert {line["method"] for line in values["summary"]["lines"]} == {"plain", "auto", "ngram"}
    assert all(line["equal"] == line["prompts"] for line in values["summary"]["lines"])


@pytest.mark.parametrize(
    "options",
    [("--limit", "0"), ("--batch", "0"), ("--rounds", "0"), ("--random", "-1"), ("--methods", "x")],
)
def test_decode_refuses_nonsense_before_it_loads_a_model(
    shell: Shell, options: tuple[str, str]
) -> None:
    ran = shell("bench", "decode", *options, pages=0)
    assert ran.code == 1
    assert ran.err.startswith("error: ")
