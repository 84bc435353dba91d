"""The README says what was measured: its tables are those of the result files in the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from outstride.bench import result
from outstride.bench.report import page, readme
from outstride.bench.result import BenchResult
from outstride.errors import OutstrideError
from tests.bench.test_report import line
from tests.cli.shell import Shell

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "docs" / "results"
MAX_BYTES = 48_000
"""Bytes of a file that is kept in the repository."""


@pytest.mark.parametrize(
    ("page", "table"), [("README.md", "engines"), ("docs/benchmarks.md", "decode")]
)
def test_pages_match_the_results(page: str, table: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert f"<!-- bench: {table} -->" in text
    assert readme.with_tables(text, KEPT) == text, (
        f"run: outstride bench report docs/results --out /tmp/report.html --tables {page}"
    )


def test_kept_results_are_small_and_name_no_place() -> None:
    for file in sorted(KEPT.glob("*.json")):
        text = file.read_text(encoding="utf-8")
        assert len(text) <= MAX_BYTES, file.name
        assert not re.search(r"/(home|root|tmp|work)/|\.\./", text), file.name
        assert result.read(file).commit, file.name


def decoded(**settings: Any) -> BenchResult:
    lines = [
        *(line("plain", g, tokens_per_pass=1.0, ratio=1.0) for g in ("chat", "mt_bench", "random")),
        *(line("auto", g, tokens_per_pass=v) for g, v in (("chat", 1.5), ("mt_bench", 2.5))),
        line("auto", "random", tokens_per_pass=1.0, ratio=1.0),
        line("mix", "chat", tokens_per_pass=3.123456789),
        line("mix", "mt_bench", tokens_per_pass=4.0, equal=3),
        line("mix", "random"),
        *(line(m, "all", prompts=12) for m in ("plain", "auto", "mix")),
        line("auto", "chat", batch=4, tokens_per_pass=9.0),
    ]
    chosen: dict[str, Any] = {
        "prompts": "/somewhere/else/question.jsonl",
        "params": {"max_tokens": 16},
    }
    chosen |= {"methods": ["auto", "mix"], **settings}
    return BenchResult("decode", chosen).finish([{"a": 1}], {"lines": lines})


def test_tables(tmp_path: Path) -> None:
    old = decoded()
    old.started = "2020-01-01"
    for row in old.summary["lines"]:
        row["tokens_per_pass"] = 7.0
    for group, value in (("chat", 2.0), ("mt_bench", 1.5), ("random", 1.0)):
        old.summary["lines"].append(line("ngram", group, tokens_per_pass=value))
    result.write(old, tmp_path / "a.json")
    result.write(decoded(), tmp_path / "b.json")
    text = "before\n<!-- bench: decode -->\nstale\n<!-- end of bench -->\nafter\n"
    made = readme.with_tables(text, tmp_path)
    assert made.startswith("before\n<!-- bench: decode -->\nTokens per pass over 8 prompts")
    assert made.endswith("\n<!-- end of bench -->\nafter\n")
    assert [row for row in made.splitlines() if row.startswith("| `")] == [
        "| `mix` | 3.12 | 4.00 | **3.56** | 1.40 | 7/8 |",
        "| `auto` | 1.50 | 2.50 | **2.00** | 1.40 | 8/8 |",
        "| `ngram` | 2.00 | 1.50 | **1.75** | 1.40 | 8/8 |",
    ]
    assert "random" not in made
    assert readme.with_tables(made, tmp_path) == made


def test_engines_and_llama(tmp_path: Path) -> None:
    summary = {"tokens_per_second": {"ours": {"1": 150.0, "8": 400.4}, "theirs": {"1": 99.6}}}
    settings = {"tokens": 64, "load average": [0.25, 1.0, 1.0]}
    result.write(BenchResult("peers", settings).finish([], summary), tmp_path / "peers.json")
    row = {
        "name": "a pass",
        "ours": 1.0,
        "theirs": 2.0,
        "unit": "ms",
        "ratio": 0.5,
        "raw": {"o": [1]},
    }
    rows = [{**row, "other": "llama.cpp"}, {**row, "name": "own", "other": "our greedy"}]
    against = BenchResult("against", {}).finish(rows, {"peer": {"version": "9"}})
    result.write(against, tmp_path / "against.json")
    blocks = "".join(
        f"<!-- bench: {n} -->\n<!-- end of bench -->\n" for n in ("engines", "against")
    )
    made = readme.with_tables(blocks, tmp_path)
    assert "| ours | 150 | 400 |\n| theirs | 100 |  |" in made
    assert "load average 0.25 before" in made
    assert "| a pass | 1.0 ms | 2.0 ms | 0.50 |" in made
    assert "own" not in made
    readme.keep(tmp_path, tmp_path / "kept")
    assert result.read(tmp_path / "kept" / "against.json").samples[0]["raw"] == {}
    assert readme.with_tables(blocks, tmp_path / "kept") == made


def test_the_command_keeps_and_rewrites(shell: Shell, tmp_path: Path) -> None:
    result.write(decoded(), tmp_path / "decode.json")
    text = tmp_path / "README.md"
    text.write_text("<!-- bench: decode -->\n<!-- end of bench -->\n")
    kept = tmp_path / "kept"
    command = ("bench", "report", str(tmp_path), "--keep", str(kept), "--tables", str(text))
    assert shell(*command).code == 0
    found = result.read(kept / "decode.json")
    assert (found.samples, found.settings["prompts"]) == ([], "question.jsonl")
    assert found.summary["lines"][6]["tokens_per_pass"] == 3.1235
    assert "| `mix` | 3.12 |" in text.read_text()
    assert page.html(page.read(kept))
    text.write_text("nothing to fill in")
    assert shell(*command).code == 1
    text.write_text("<!-- bench: other -->\n<!-- end of bench -->\n")
    assert "there is no table 'other'" in shell(*command).err


def test_unknown_blocks(tmp_path: Path) -> None:
    result.write(decoded(), tmp_path / "decode.json")
    with pytest.raises(OutstrideError, match="there is no table"):
        readme.with_tables("<!-- bench: x -->\n<!-- end of bench -->", tmp_path)
