"""`outstride serve`: every option arrives, nonsense is refused before a model is loaded."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from outstride.cli import serve as command
from outstride.cli.app import parser
from tests.cli.shell import Shell

ROOT = Path(__file__).parents[2]


def options(name: str) -> set[str]:
    commands = next(a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    actions = commands.choices[name]._actions
    return {s for a in actions for s in a.option_strings if s.startswith("--")} - {"--help"}


def test_every_option_arrives(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Any] = []

    def serve(*arguments: Any) -> int:
        seen.extend(arguments)
        return 0

    monkeypatch.setattr("outstride.serve.run.serve", serve)
    monkeypatch.delenv(command.KEY, raising=False)
    keys = tmp_path / "keys"
    keys.write_text("second\nthird\n")
    given = {
        "--model": "parallel-full",
        "--weights": "fp32",
        "--host": "::1",
        "--port": "9",
        "--name": "small",
        "--method": "steps",
        "--draft-model": "parallel-block",
        "--adapter": "some/folder",
        "--pages": "7",
        "--max-sequences": "3",
        "--max-nodes": "33",
        "--api-key": "first",
        "--api-key-file": str(keys),
        "--origin": "http://localhost",
        "--queue": "5",
        "--deadline": "6.5",
        "--grace": "2.5",
    }
    assert {*given, "--no-log"} == options("serve")
    ran = shell("serve", "--no-log", *(word for pair in given.items() for word in pair))
    assert ran.code == 0, ran.err
    settings, host, port = seen
    engine = settings.engine
    assert (host, port) == ("::1", 9)
    assert (engine.model, engine.weights, engine.pages) == ("parallel-full", "fp32", 7)
    assert (engine.max_sequences, engine.max_nodes) == (3, 33)
    assert engine.draft_models == ("parallel-block",)
    assert engine.adapter == "some/folder"
    assert (settings.names, settings.method) == (("small",), "steps")
    assert settings.api_keys == ("first", "second", "third")
    assert settings.origins == ("http://localhost",)
    assert (settings.queue, settings.bounds.deadline, settings.grace) == (5, 6.5, 2.5)
    assert not settings.log


@pytest.mark.parametrize(
    "words",
    [
        "--port 99999",
        "--port -1",
        "--deadline nan",
        "--deadline 0",
        "--pages 0",
        "--grace nan",
        "--queue -1",
        "--max-nodes 0",
        "--max-sequences 0",
        "--model none",
        "--api-key-file none",
    ],
)
def test_nonsense_is_refused_at_once(shell: Shell, words: str) -> None:
    ran = shell("serve", *words.split())
    assert ran.code == 1
    assert ran.err.startswith("error: ")


def test_every_option_is_documented() -> None:
    page = (ROOT / "docs" / "server.md").read_text()
    assert not [option for option in options("serve") if f"`{option}`" not in page]
