"""`bench all`: its parts are real commands, one that fails stops nobody, and a cut run has its page."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outstride.bench import peer_environments, suite
from outstride.bench.suite import RemainingTime, SuiteOptions, SuitePart, in_words, parts
from outstride.cli.app import parser
from outstride.errors import OutstrideError
from tests.cli.shell import Shell

ROOT = Path(__file__).resolve().parents[2]
FILES: Any = {"gsm8k": "g.jsonl", "humaneval": "h.jsonl"}


@pytest.mark.parametrize("quick", [False, True])
def test_all_parts_are_commands(quick: bool) -> None:
    found = parts(SuiteOptions("smollm2", "auto", quick=quick, **FILES))
    assert [part.name for part in found] == [
        *("step", "against", "peers", "decode", "batches", "parallel", "serve", "quality")
    ]
    for part in found:
        words = suite.command(part, Path("out"), "http://x" if part.served else None)
        args = parser().parse_args(words[3:])
        assert args.what == part.arguments[0]
        assert args.out == f"out/{part.name}.json"


def test_everything_takes_less_than_half_an_hour() -> None:
    assert sum(part.seconds for part in parts(SuiteOptions("m", "auto", **FILES))) < 28 * 60


def test_engines_elsewhere_take_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_environments, "ENVIRONMENTS", tmp_path)
    [few] = parts(SuiteOptions("m", "auto", only=("peers",)))
    for name in suite.FAR:
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").touch()
    [many] = parts(SuiteOptions("m", "auto", only=("peers",)))
    assert many.seconds == few.seconds + sum(suite.FAR.values())
    assert sum(part.seconds for part in parts(SuiteOptions("m", "auto"))) < 30 * 60


def test_parts_can_be_chosen() -> None:
    assert [p.name for p in parts(SuiteOptions("m", "auto", only=("serve", "step")))] == [
        "step",
        "serve",
    ]
    with pytest.raises(OutstrideError, match="no part 'quality'"):
        parts(SuiteOptions("m", "auto", only=("quality",)))


def test_time_left_follows_what_was_seen() -> None:
    planned = [SuitePart("a", (), 10), SuitePart("b", (), 30), SuitePart("c", (), 60)]
    watch = RemainingTime(planned)
    assert watch.left == 100
    watch.done(planned[0], 20)
    assert watch.left == 180
    assert in_words(1.2) == "about 1 s"
    assert in_words(600) == "about 10 minutes"


STUB = """
import sys, time
from outstride.bench import result
name, path, how = sys.argv[1:]
found = result.BenchResult("step", {"model": name})
found.enter([{"x": 1}], {})
result.write(found, path)
if how == "fail": sys.exit(3)
if how == "hang": time.sleep(3600)
result.write(found.finish([{"x": 1}], {}), path)
"""


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Three parts that do what they are told."""
    how: dict[str, str] = {}

    def command(part: SuitePart, folder: Path, url: str | None = None) -> list[str]:
        del url
        out = str(folder / f"{part.name}.json")
        return [sys.executable, "-c", STUB, part.name, out, how.get(part.name, "")]

    monkeypatch.setattr(suite, "parts", lambda _: [SuitePart(n, (), 1.0) for n in ("a", "b", "c")])
    monkeypatch.setattr(suite, "command", command)
    return how


def test_a_whole_run(shell: Shell, tmp_path: Path, stubs: dict[str, str]) -> None:
    (tmp_path / "b.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    ran = shell("bench", "all", "--folder", str(tmp_path))
    assert (ran.code, ran.last) == (0, str(tmp_path / "report.html"))
    assert {p.name for p in tmp_path.glob("*.json")} == {"a.json", "b.json", "c.json"}
    assert (tmp_path / "notes.txt").exists()
    assert "2 of 3: b, about" in ran.err
    assert "took about" in ran.err
    assert not stubs


def test_a_part_that_fails(shell: Shell, tmp_path: Path, stubs: dict[str, str]) -> None:
    stubs["b"] = "fail"
    ran = shell("bench", "all", "--folder", str(tmp_path), "--quick")
    assert ran.code == 1
    assert "failed: b" in ran.err
    assert "incomplete: b" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "c.json").exists()


def test_an_interrupted_run(shell: Shell, tmp_path: Path, stubs: dict[str, str]) -> None:
    stubs["b"] = "hang"
    watcher = f"""
import os, signal, time
from pathlib import Path
while not Path({str(tmp_path / "b.json")!r}).exists(): time.sleep(0.02)
os.kill({os.getpid()}, signal.SIGTERM)
"""
    with subprocess.Popen([sys.executable, "-c", watcher]):
        ran = shell("bench", "all", "--folder", str(tmp_path))
    assert ran.code == 130
    assert not (tmp_path / "c.json").exists()
    assert "incomplete: b" in (tmp_path / "report.html").read_text()


def test_a_server_that_does_not_come_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with (
        pytest.raises(OutstrideError, match="did not become ready"),
        suite.serving("some-model", "auto", tmp_path / "log"),
    ):
        pytest.fail("it cannot be there")


@pytest.mark.model
def test_a_quick_run_with_a_server(tmp_path: Path) -> None:
    """The real thing at a small scale: a part in its own process, on a server of its own."""
    command = [sys.executable, "-m", "outstride.cli", "bench", "all", "--quick"]
    command += ["--folder", str(tmp_path), "--only", "serve"]
    environment: Any = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    text = (tmp_path / "report.html").read_text()
    assert '<section id="latency">' in text
    assert "Cut short" not in text


def test_signals_are_as_before() -> None:
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
