"""Runs the program in this process, on the toy model."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import pytest

from outstride.cli import main
from tests.bench import fake


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        return self.out.splitlines()[-1]


class Shell:
    """Calls `main` as a shell would."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def __call__(self, *arguments: str, stdin: str = "", **model: Any) -> Ran:
        self._monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        self._capsys.readouterr()
        code = main(arguments, context=fake.context(**model))
        captured = self._capsys.readouterr()
        return Ran(code, captured.out, captured.err)
