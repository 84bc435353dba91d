"""`outstride chat`: through a pipe, and in a terminal where Ctrl-C is pressed."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outstride.cli.chat import Chat
from outstride.core.params import SamplingParams
from outstride.llm import LLM
from outstride.results import Chunk
from tests.bench.fake import make_llm
from tests.cli.shell import Shell

ROOT = Path(__file__).resolve().parents[2]
COST = re.compile(r"\d+ tokens, \d+ passes, \d+\.\d\d tokens per pass, .* tok/s.*")


def test_through_a_pipe(shell: Shell) -> None:
    ran = shell("chat", "--max-tokens", "8", "--ignore-eos", stdin="hello\n\nand you?\n")
    assert ran.code == 0
    assert ran.err == ""
    assert "> " not in ran.out
    assert len([line for line in ran.out.splitlines() if COST.fullmatch(line)]) == 2
    with make_llm() as llm:
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        messages = [{"role": "user", "content": "hello"}]
        [first] = llm.chat([messages], params)
        messages += [
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "and you?"},
        ]
        [second] = llm.chat([messages], params)
    assert ran.out.startswith(first.text)
    assert second.text in ran.out


def test_lines_can_be_joined(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    shell("chat", "--max-tokens", "4", stdin=f"one\\\ntwo\n/save {file}\n")
    assert json.loads(file.read_text())["messages"][0]["content"] == "one\ntwo"


def test_commands(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    lines = [
        *("/help", "hello", "/method", "/method ngram", "/set", "/set temperature=0.5"),
        *("/set seed=3", "/set stop=zzz", "again", "/stats", f"/save {file}", "/set seed=none"),
        *("/reset", "/quit", "not reached"),
    ]
    options = ["--system", "be brief", "--max-tokens", "12", "--ignore-eos"]
    ran = shell("chat", *options, stdin="\n".join(lines))
    assert ran.code == 0
    assert ran.err == ""
    assert "/save FILE" in ran.out
    assert "method auto\nmethod ngram\n" in ran.out
    assert "max_tokens=12, ignore_eos=True\n" in ran.out
    assert "temperature=0.5, seed=3, stop=('zzz',), max_tokens=12" in ran.out
    assert "temperature=0.5, stop=('zzz',), max_tokens=12" in ran.out
    assert re.search(r"24 tokens, \d+ passes, .* prefill passes", ran.out)
    assert ran.last == "a new conversation"
    saved = json.loads(file.read_text())
    assert [message["role"] for message in saved["messages"]] == [
        *("system", "user", "assistant", "user", "assistant")
    ]
    assert (saved["method"], saved["params"]["seed"]) == ("ngram", 3)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/nothing", "there is no command /nothing"),
        ("/method ngrm", "did you mean ngram"),
        ("/set temperature=-1", "temperature"),
        ("/set heat=1", "unknown sampling parameter 'heat'"),
        ("/set temperature", "write /set key=value"),
        ("/set n=2", "n is not available"),
        ("/save", "write /save FILE"),
        ("/save /nowhere/at/all", "No such file or directory"),
        ("x" * 600, "/reset starts a new conversation"),
    ],
)
def test_mistakes_do_not_end_the_conversation(shell: Shell, line: str, said: str) -> None:
    ran = shell("chat", "--max-tokens", "5", stdin=f"{line}\nhello\n")
    assert ran.code == 0
    assert ran.err.startswith("error: ")
    assert said in ran.err
    assert len(ran.err.splitlines()) == 1
    assert COST.fullmatch(ran.last)


def test_what_failed_is_not_remembered() -> None:
    with make_llm() as llm:
        chat = Chat(llm, params=SamplingParams(max_tokens=4))
        assert chat.handle("x" * 600)
        assert chat.messages == []


def test_an_answer_that_was_cut_says_how_to_get_more(shell: Shell) -> None:
    ran = shell("chat", "--max-tokens", "5", "--ignore-eos", stdin="hello\n")
    assert ran.last.endswith("(cut; /set max_tokens=10)")


def test_an_interrupt_stops_the_answer_and_keeps_what_was_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stream(*_: object, **__: object) -> Iterator[Chunk]:
        yield Chunk("half an", [1])
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", stream)
    with make_llm() as llm:
        chat = Chat(llm, params=SamplingParams())
        assert chat.handle("hello")
        assert chat.messages[-1] == {"role": "assistant", "content": "half an"}
    assert capsys.readouterr().out == "half an\nstopped\n"


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cli.talk", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=ROOT,
            start_new_session=True,
            # A shell that runs tests in the background ignores interrupts, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            env={**os.environ, "TERM": "dumb", "COLUMNS": "100"},
        )
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def insist(self) -> None:
        """Interrupts until it ends: one that comes before the prompt is read stops nothing."""
        for _ in range(10):
            self.interrupt()
            try:
                self.process.wait(6)
                return
            except subprocess.TimeoutExpired:
                continue

    def until(self, pattern: str, seconds: float = 60) -> None:
        """Reads until the pattern has appeared, and forgets what was read."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.seen):
            ready, _, _ = select.select([self._master], [], [], deadline - time.monotonic())
            assert ready, f"{pattern!r} did not appear in {self.seen!r}"
            self.seen += os.read(self._master, 4096).decode(errors="replace")
        self.seen = ""

    def end(self) -> int:
        code = self.process.wait(60)
        os.close(self._master)
        return code


@pytest.mark.parametrize("leave", ["\x04", "interrupt", "/quit\n"])
def test_in_a_terminal(leave: str) -> None:
    terminal = Terminal("chat", "--ignore-eos", "--max-tokens", "400")
    terminal.until("> ")
    terminal.type("hello\n")
    terminal.until(r"hello\r\n.{4}")
    terminal.interrupt()
    terminal.until(r"stopped[\s\S]*> ")
    terminal.type("/set max_tokens=3\n")
    terminal.until("max_tokens=3[^>]*> ")
    terminal.type("more\n")
    terminal.until(r"3 tokens, [\s\S]*> ")
    if leave == "interrupt":
        terminal.insist()
    else:
        terminal.type(leave)
    assert terminal.end() == 0


def test_run_is_interrupted_cleanly() -> None:
    terminal = Terminal("run", "hello", "--ignore-eos", "--max-tokens", "400")
    terminal.until(r"\w{4}")
    terminal.interrupt()
    assert terminal.process.wait(60) == 130
    left = os.read(terminal._master, 65536).decode(errors="replace")
    assert "Traceback" not in left
    assert "error" not in left
    terminal.end()
