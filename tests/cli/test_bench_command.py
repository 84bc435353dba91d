"""`outstride bench decode` on the command line: its settings, and the help of every bench."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outstride.bench import result
from outstride.bench.decode import exact_methods
from tests.cli.shell import Shell

BENCHES = ("step", "decode", "peers", "serve", "parallel", "quality", "fidelity", "acceptance")


@pytest.mark.parametrize("what", [*BENCHES, "all", "report", "regress"])
def test_help(shell: Shell, what: str) -> None:
    ran = shell("bench", what, "--help")
    assert ran.code == 0
    assert ran.out.startswith(f"usage: outstride bench {what}")


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": p, "group": g} for p, g in (("abcabc", "x"), ("one one", "x"), ("hey", "y"))]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_decode_goes_through_all_settings(shell: Shell, prompts: str, tmp_path: Path) -> None:
    out = tmp_path / "decode.json"
    options = ("--batch", "1,3", "--temperature", "0,0.8", "--cost", "1=6,8=9")
    more = ("--prompts", prompts, "--max-tokens", "4", "--out", str(out))
    ran = shell("bench", "decode", "--methods", "exact", *options, *more)
    assert ran.code == 0
    values = result.read(out)
    assert values.settings["methods"] == exact_methods()
    assert (values.settings["frozen"], values.settings["cost"]) == (True, {"1": 0.006, "8": 0.009})
    lines = values.summary["lines"]
    assert {(row["batch"], row["temperature"]) for row in lines} == {
        *((1, 0.0), (1, 0.8), (3, 0.0), (3, 0.8))
    }
    assert {row["group"] for row in lines if row["batch"] == 3} == {"mixed"}
    assert all(row["equal"] == row["prompts"] for row in lines)
    assert "3 at a time, temperature 0.8" in ran.out
    again = tmp_path / "again.json"
    options = ("--batch", "1,3", "--temperature", "0,0.8", "--cost", str(out))
    more = ("--prompts", prompts, "--max-tokens", "4", "--out", str(again))
    assert shell("bench", "decode", "--methods", "exact", *options, *more, "--json").code == 0
    ran = shell("bench", "regress", str(out), str(again), "--tolerance", "0.99")
    assert ran.code == 0, ran.out  # counts are compared exactly, times hardly


def test_decode_uses_the_shipped_prompts(shell: Shell) -> None:
    ran = shell("bench", "decode", "--limit", "8", "--max-tokens", "2", context=2048, pages=2048)
    values = json.loads(ran.last)
    assert values["settings"]["prompts"] == "shipped"
    assert values["settings"]["frozen"] is False
    assert len({row["group"] for row in values["summary"]["lines"]}) >= 6


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--batch", "0"), 1),
        (("--batch", ""), 1),
        (("--batch", "x"), 2),
        (("--temperature", "-1"), 1),
        (("--temperature", "x"), 2),
        (("--cost", "1=x"), 1),
        (("--cost", "none.json"), 1),
    ],
)
def test_decode_refuses_nonsense(shell: Shell, options: tuple[str, str], code: int) -> None:
    assert shell("bench", "decode", *options, pages=0).code == code
