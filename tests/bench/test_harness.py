"""A run that is cut short, however rudely, keeps what it measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from outstride.bench import clock, harness, result
from outstride.bench.harness import ProgressCounter, record
from outstride.bench.result import BenchResult
from outstride.cli import screen
from tests.cli.shell import Shell

ROOT = Path(__file__).resolve().parents[2]


class Counted:
    """A report that counts."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def samples(self) -> list[dict[str, Any]]:
        return [{"value": value} for value in self.found]

    def summary(self) -> dict[str, Any]:
        return {"sum": sum(self.found)}


def counting(
    report: Counted, until: int, end: BaseException | None = None
) -> Callable[[harness.Progress], None]:
    def run(progress: harness.Progress) -> None:
        for value in range(until):
            report.found.append(value)
            progress(value + 1, until)
        if end is not None:
            raise end

    return run


def test_a_whole_run(tmp_path: Path) -> None:
    report, file, ticks = Counted(), tmp_path / "new" / "r.json", list[tuple[int, int]]()
    found = BenchResult("step", {})
    assert record(
        found, report, counting(report, 3), path=file, progress=lambda *now: ticks.append(now)
    )
    assert result.read(file).to_dict() == found.to_dict()
    assert (found.complete, found.summary, len(found.samples)) == (True, {"sum": 3}, 3)
    assert ticks == [(1, 3), (2, 3), (3, 3)]


def test_ctrl_c_keeps_what_there_is(tmp_path: Path) -> None:
    report, found = Counted(), BenchResult("step", {})
    run = counting(report, 4, KeyboardInterrupt())
    assert not record(found, report, run, path=tmp_path / "r.json")
    kept = result.read(tmp_path / "r.json")
    assert (kept.complete, kept.summary) == (False, {"sum": 6})


def test_an_error_keeps_what_there_is(tmp_path: Path) -> None:
    report, found = Counted(), BenchResult("step", {})
    with pytest.raises(ZeroDivisionError):
        record(found, report, counting(report, 2, ZeroDivisionError()), path=tmp_path / "r.json")
    assert result.read(tmp_path / "r.json").summary == {"sum": 1}
    with pytest.raises(ZeroDivisionError):
        record(found, Counted(), counting(Counted(), 0, ZeroDivisionError()), path=tmp_path / "no")
    assert not (tmp_path / "no").exists(), "nothing measured, nothing written"


def test_a_polite_kill_is_an_interruption() -> None:
    report, found = Counted(), BenchResult("step", {})
    before = signal.getsignal(signal.SIGTERM)

    def run(progress: harness.Progress) -> None:
        counting(report, 2)(progress)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    assert not record(found, report, run)
    assert len(found.samples) == 2
    assert signal.getsignal(signal.SIGTERM) == before


def test_writing_does_not_take_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    writes: list[float] = []

    def write(*_: Any) -> None:
        writes.append(now[0])
        now[0] += 1.0  # a second for each

    monkeypatch.setattr(clock, "now", lambda: now[0])
    monkeypatch.setattr(result, "write", write)
    growing = harness.IncrementalResult(BenchResult("step", {}), Counted(), tmp_path / "r.json")
    for _ in range(200):
        now[0] += 1.0
        growing.write_if_due()
    assert writes[0] == pytest.approx(harness.EVERY)
    assert len(writes) <= 1 + 200 * harness.SHARE


def test_progress_never_runs_past_its_end() -> None:
    seen: list[tuple[int, int]] = []
    watch = ProgressCounter(lambda *now: seen.append(now))
    watch.expected = 1
    watch.advance()
    watch.advance()
    assert seen == [(1, 1), (2, 2)]


RUN = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # background shells have it ignored
from outstride.bench import harness
harness.EVERY = 0.05
from outstride.cli import main
from tests.bench import fake
sys.exit(main(sys.argv[1:], context=fake.context(pause=0.005)))
"""


def start(out: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", RUN, "bench", *arguments, "--out", str(out)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for(out: Path, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 600
    while not out.exists() or not json.loads(out.read_text())["samples"]:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


DECODE = ("decode", "--methods", "ngram", "--rounds", "5000", "--max-tokens", "8")


def short(folder: Path) -> tuple[str, str]:
    """Prompts that the fake model has room for: one that it has not would end the bench by itself."""
    file = folder / "prompts.txt"
    file.write_text("Hello there.\nCount to three.\nName a colour.\n")
    return "--prompts", str(file)


def test_a_killed_bench_leaves_a_result(tmp_path: Path) -> None:
    """Not even a kill that nobody can catch takes away what was measured."""
    out = tmp_path / "decode.json"
    process = start(out, *DECODE, *short(tmp_path))
    wait_for(out, process)
    process.kill()
    process.communicate()
    kept = result.read(out)
    assert not kept.complete
    assert kept.samples
    assert kept.summary["lines"]


def test_an_interrupted_bench_says_what_it_has(tmp_path: Path) -> None:
    out = tmp_path / "decode.json"
    process = start(out, *DECODE, *short(tmp_path))
    wait_for(out, process)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 130
    values = json.loads(said.decode().splitlines()[-1])
    assert values == result.read(out).to_dict()
    assert not values["complete"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("step", "--nodes", "1,2", "--cached", "4", "--lengths", "0", "--sequences", "1"),
        ("decode", "--methods", "ngram", "--limit", "6", "--max-tokens", "4"),
    ],
)
def test_commands_that_are_cut_short(
    shell: Shell, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut at many places: never an error, always a result."""
    for cut in (1, 2, 5, 9):

        @contextmanager
        def bar(_: str, cut: int = cut) -> Iterator[harness.Progress]:
            def show(done: int, total: int) -> None:
                del total
                if done == cut:
                    raise KeyboardInterrupt

            yield show

        monkeypatch.setattr(screen, "bar", bar)
        ran = shell("bench", *arguments, context=2048, pages=2048)
        assert ran.code == 130
        assert result.validate(json.loads(ran.last))["complete"] is False
