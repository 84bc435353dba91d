"""Loading and first answers of new processes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from outstride.bench import new_process, result
from outstride.errors import OutstrideError
from tests.cli.shell import Shell
from tests.serve import tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("start") / "tiny")


def test_later_processes_find_what_the_first_left() -> None:
    folders: list[Path] = []

    def ask(cache: Path) -> dict[str, Any]:
        folders.append(cache)
        if len(folders) == 1:
            assert not list(cache.iterdir())
            (cache / "converted").mkdir()
            (cache / "converted" / "weights").write_bytes(bytes(1000))
            return {
                "imports": 1.0,
                "load": 9.0,
                "growth": 1200,
                "size": 1000,
                "answers": [2.0, 1.4],
            }
        assert (cache / "converted" / "weights").is_file()
        return {"load": 1.0 + len(folders), "answers": [1.1, 1.0]}

    ticks: list[tuple[int, int]] = []
    report = new_process.measure(ask, repeat=3, progress=lambda *now: ticks.append(now))
    assert ticks[-1] == (4, 4)
    assert len(set(folders)) == 1
    assert not folders[0].exists()
    rows = {row.name: row for row in report.rows}
    assert rows["LLM(), first load"].met is True
    assert rows["weights kept on disk"].ours == pytest.approx(0.001)
    assert rows["LLM(), later"].ours == 4.0
    assert rows["LLM(), later"].met is False
    assert rows["anonymous memory of the first load at its peak"].ratio == pytest.approx(1.2)
    assert rows["first answer after the second, no cost curve"].ours == pytest.approx(0.6)
    assert rows["first answer after the second, no cost curve"].met is False
    assert rows["first answer, cost curve on disk"].ratio == pytest.approx(1.1)


def test_memory_is_seen_while_it_is_used() -> None:
    if not new_process.anonymous():
        pytest.skip("this system does not say how much memory is anonymous")
    with new_process.PeakMemory() as memory:
        block = bytearray(b"x" * 50_000_000)
        time.sleep(0.1)
        del block
    assert 50e6 <= memory.growth < 150e6


def test_the_command(shell: Shell, checkpoint: Path) -> None:
    options = ("--model", str(checkpoint), "--weights", "fp32", "--tokens", "2", "--repeat", "1")
    ran = shell("bench", "start", *options, "--method", "plain")
    assert ran.code == 0, ran.err
    values = result.validate(json.loads(ran.last))
    assert values["kind"] == "start"
    assert {row["name"] for row in values["samples"]} >= {"LLM(), first load", "LLM(), later"}
    assert "must be" in ran.out
    assert shell("bench", "start", "--repeat", "0").code == 1


def test_a_process_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OutstrideError, match=r"a new process ended with 1: .*nothing"):
        new_process.NewProcess(tmp_path / "nothing.gguf").ask(tmp_path)
