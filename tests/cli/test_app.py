"""The program as a whole: help, exit codes, and errors in one line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from outstride.cli import app, main
from outstride.cli.context import Context
from outstride.errors import CorruptModel
from outstride.llm import LLM
from tests.cli.shell import Shell

COMMANDS: tuple[list[str], ...] = (
    [],
    ["run"],
    ["chat"],
    ["methods"],
    ["models"],
    ["bench"],
    ["bench", "step"],
    ["prove"],
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help(shell: Shell, command: list[str]) -> None:
    ran = shell(*command, "--help")
    assert ran.code == 0
    assert ran.out.startswith(" ".join(["usage: outstride", *command]))
    assert ran.err == ""


def test_version(shell: Shell) -> None:
    ran = shell("--version")
    assert (ran.code, ran.out.split()[0]) == (0, "outstride")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nothing"],
        ["run"],
        ["run", "x", "--temp", "1"],
        ["bench"],
        ["bench", "step", "--nodes", "a"],
    ],
)
def test_wrong_usage(shell: Shell, arguments: list[str]) -> None:
    ran = shell(*arguments)
    assert ran.code == app.USAGE
    assert "usage:" in ran.err + ran.out


def failing(error: BaseException) -> Context:
    def load(_name: str, _device: str, _weights: str) -> LLM:
        raise error

    return Context(load=load)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (CorruptModel("it is\ncut off"), 1, "error: it is cut off\n"),
        (FileNotFoundError(2, "No such file", "a.gguf"), 1, "error: No such file: a.gguf\n"),
        (TypeError("x"), 1, "error: TypeError: x (unexpected; OUTSTRIDE_DEBUG=1 shows where)\n"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_errors_become_exit_codes(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    said: str,
) -> None:
    monkeypatch.delenv("OUTSTRIDE_DEBUG", raising=False)
    monkeypatch.setattr(app, "_detach_stdout", lambda: None)
    assert main(["run", "x"], context=failing(error)) == code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", said)


def test_debugging_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTSTRIDE_DEBUG", "1")
    with pytest.raises(CorruptModel):
        main(["run", "x"], context=failing(CorruptModel("x")))


def test_help_and_lists_do_without_torch() -> None:
    code = (
        "import sys; from outstride.cli import main; main(['methods']); main(['models', '--json']);"
        "main(['run', '--help']); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_goes_away_is_no_error() -> None:
    script = f"{sys.executable} -m outstride.cli methods --json | head -c 1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {script}"], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout == "["


def test_a_missing_model_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "outstride.cli", "run", "x", "--model", "./none.gguf"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "none.gguf" in done.stderr
    assert len(done.stderr.splitlines()) == 1
