"""Fixtures of the command-line tests."""

from __future__ import annotations

import pytest

from tests.cli.shell import Shell


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    """The program on the toy model, without tracebacks."""
    monkeypatch.delenv("OUTSTRIDE_DEBUG", raising=False)
    return Shell(capsys, monkeypatch)
