"""`outstride serve`: every option arrives, nonsense is refused before a model is loaded."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest

from outstride.cli import serve as command
from outstride.cli.app import parser
from outstride.serve.ipc import Handshake
from tests.cli.shell import Shell
from tests.serve import tiny
from tests.serve.running import start

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
        "--device": "cpu",
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
        "--tool-parser": "hermes",
        "--reasoning-parser": "none",
    }
    flags = ("--no-log", "--trust-remote-code")
    monkeypatch.setenv("OUTSTRIDE_TRUST_REMOTE_CODE", "")
    assert {*given, *flags} == options("serve")
    ran = shell("serve", *flags, *(word for pair in given.items() for word in pair))
    assert ran.code == 0, ran.err
    settings, host, port, _ = seen
    engine = settings.engine
    assert (host, port) == ("::1", 9)
    assert (engine.model, engine.device, engine.weights) == ("parallel-full", "cpu", "fp32")
    assert engine.pages == 7
    assert (engine.max_sequences, engine.max_nodes) == (3, 33)
    assert engine.draft_models == ("parallel-block",)
    assert engine.adapter == "some/folder"
    assert (settings.names, settings.method) == (("small",), "steps")
    assert settings.api_keys == ("first", "second", "third")
    assert settings.origins == ("http://localhost",)
    assert (settings.queue, settings.bounds.deadline, settings.grace) == (5, 6.5, 2.5)
    assert not settings.log
    assert (settings.tool_parser, settings.reasoning_parser) == ("hermes", "none")
    assert os.environ["OUTSTRIDE_TRUST_REMOTE_CODE"]


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
        "--device cpu --weights bf16",
        "--device cuda --weights int8",
        "--api-key-file none",
    ],
)
def test_nonsense_is_refused_at_once(shell: Shell, words: str) -> None:
    ran = shell("serve", *words.split())
    assert ran.code == 1
    assert ran.err.startswith("error: ")


def test_the_ready_line_has_what_a_user_needs() -> None:
    handshake = Handshake(
        model="smollm2",
        fingerprint="abc",
        operations="cpu avx2 int8",
        context=8192,
        capacity=16384,
        vocab_size=100,
        tokenizer=b"",
        device="cpu",
        weights="int8",
        kv_bytes=203_000_000,
    )
    text = command.ready_text(handshake, "http://127.0.0.1:8000", "auto")
    assert text.splitlines()[0] == "ready: http://127.0.0.1:8000"
    for said in (
        "model smollm2, device cpu, weights int8 (cpu avx2 int8)",
        "context length 8,192 tokens",
        "KV cache 16,384 tokens (203 MB)",
        "default method auto",
    ):
        assert said in text


def test_a_server_says_when_it_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTSTRIDE_CACHE", str(tmp_path / "cache"))
    log = tmp_path / "log"
    with start(tiny.make(tmp_path / "tiny"), log, "--device", "cpu", "--pages", "32") as server:
        said = log.read_text().splitlines()
        assert f"ready: http://127.0.0.1:{server.port}" in said
        [line] = [json.loads(one) for one in said if one.startswith("{")]
        assert (line["event"], line["device"], line["method"]) == ("ready", "cpu", "auto")
        assert line["capacity"] == 32 * 16
        assert line["kv_bytes"] > 0


def test_every_option_is_documented() -> None:
    page = (ROOT / "docs" / "server.md").read_text()
    assert not [option for option in options("serve") if f"`{option}`" not in page]
