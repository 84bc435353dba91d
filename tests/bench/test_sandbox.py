"""Code that a model wrote: honest programs run, hostile ones are contained."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from outstride.bench import jail, sandbox
from outstride.errors import OutstrideError

pytestmark = pytest.mark.skipif(
    not jail.supported(), reason="nothing is run where nothing confines"
)


def test_honest_programs_run() -> None:
    program = "import math, re, typing, collections, heapq\nassert math.comb(5, 2) == 10"
    assert sandbox.run(program) == sandbox.Outcome(True, "done")
    wrong = sandbox.run("def f(): return 1\nassert f() == 2, 'not two'")
    assert wrong == sandbox.Outcome(False, "AssertionError: not two")
    assert sandbox.run("def f(:").message.startswith("SyntaxError")


@pytest.mark.parametrize("ending", ["import os\nos._exit(0)", "raise SystemExit(0)", "exit()"])
def test_leaving_early_is_not_passing(ending: str) -> None:
    assert not sandbox.run(f"{ending}\nassert False").passed


@pytest.mark.parametrize(
    "program",
    ["while True: pass", "import time\ntime.sleep(3600)", "while True: print('x' * 10**6)"],
)
def test_endless_programs_are_ended(program: str) -> None:
    assert sandbox.run(program, seconds=1.0).message in ("out of time", "ended without a message")


def test_memory_is_limited() -> None:
    assert sandbox.run("x = bytearray(2 << 30)").message.startswith("MemoryError")
    hog = "x = []\nwhile True: x.append(bytearray(1 << 22))"
    assert not sandbox.run(hog, memory=128 << 20).passed


def children(pid: int) -> set[str]:
    return set(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


@pytest.mark.parametrize(
    "attack",
    [
        "import os\nwhile True: os.fork()",
        "import os\nos.posix_spawn('/bin/sh', ['sh'], {})",
        "import subprocess\nsubprocess.Popen(['sleep', '60'])",
        "import ctypes\nassert ctypes.CDLL(None).fork() != -1",
        "import threading\nthreading.Thread(target=lambda: 1).start()",
    ],
)
def test_no_further_processes(attack: str) -> None:
    before = children(os.getpid())
    outcome = sandbox.run(attack)
    assert not outcome.passed
    assert outcome.message != "out of time", "refused at once, not only ended"
    assert children(os.getpid()) <= before


def test_nothing_is_written_anywhere(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("mine")
    for attack in (
        f"open({str(tmp_path / 'new')!r}, 'w').write('x')",
        f"open({str(kept)!r}, 'r+').write('x')",
        f"import os\nos.open({str(tmp_path / 'new')!r}, os.O_CREAT)",
        f"import os\nos.unlink({str(kept)!r})",
        f"import os\nos.rename({str(kept)!r}, {str(tmp_path / 'new')!r})",
        f"import os\nos.truncate({str(kept)!r}, 0)",
        f"import os\nos.chmod({str(kept)!r}, 0)",
        f"import os\nos.mkdir({str(tmp_path / 'new')!r})",
        f"import os\nos.symlink('x', {str(tmp_path / 'new')!r})",
        "open('here', 'w')",
        "open('/dev/shm/outstride', 'w')",
    ):
        assert sandbox.run(attack).message.startswith("PermissionError"), attack
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("kept", "mine")]


def test_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        attack = f"import socket\nsocket.create_connection(('127.0.0.1', {port}))"
        assert sandbox.run(attack).message.startswith("PermissionError")
        with pytest.raises(TimeoutError):
            server.accept()


def test_others_are_left_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"]) as other:
        try:
            attack = f"import os\nos.kill({other.pid}, 9)"
            assert sandbox.run(attack).message.startswith("PermissionError")
            assert sandbox.run("import os\nos.killpg(0, 9)").message.startswith("PermissionError")
            assert other.poll() is None
        finally:
            other.kill()


def test_limits_cannot_be_lifted() -> None:
    raising = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))"
    assert not sandbox.run(raising).passed


def test_the_environment_stays_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "sesame")
    assert sandbox.run("import os\nassert 'SECRET' not in os.environ").passed
    assert sandbox.run("import os\nassert os.listdir('.') == []").passed
    assert sandbox.run("import sys\nassert not any('site-packages' in p for p in sys.path)").passed


def test_what_cannot_be_confined_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jail, "supported", lambda: False)
    with pytest.raises(OutstrideError, match="only where it can be confined"):
        sandbox.run("pass")


def test_a_kernel_that_takes_no_filter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Path(jail.__file__).read_text().replace("_NO_NEW_PRIVS, 1, 0", "_NO_NEW_PRIVS, 7, 0")
    (tmp_path / "jail.py").write_text(broken)
    monkeypatch.setattr(sandbox, "_JAIL", tmp_path / "jail.py")
    with pytest.raises(OutstrideError, match="cannot be confined"):
        sandbox.run("pass")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_refuses_what_it_does_not_know(machine: str) -> None:
    """The filter, interpreted here: known calls pass, all others are refused."""
    lines = jail.filter_lines(machine)
    kernel, free, opening = jail._ALLOWED[machine]

    def verdict(number: int, flags: int = 0, kernel: int = kernel) -> int:
        at, held = 0, 0
        while True:
            code, yes, no, value = lines[at]
            at += 1
            if code == jail._LOAD:
                held = {0: number, 4: kernel}.get(value, flags)
            elif code == jail._EQUAL:
                at += yes if held == value else no
            elif code == jail._ANY:
                at += yes if held & value else no
            else:
                return value

    assert {n for n in range(600) if verdict(n, 0o1) == jail._ALLOW} == set(free)
    for number in opening:
        assert verdict(number, os.O_RDONLY | 0o2000000) == jail._ALLOW
        for flag in (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC, os.O_APPEND):
            assert verdict(number, flag) == jail._REFUSE
    assert verdict(free[0] | 0x40000000) == jail._REFUSE
    assert verdict(free[0], kernel=1) == jail._KILL
