"""Engines that die, servers that are told to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai

from tests.serve.running import MESSAGES, Running, start

LONG: dict[str, Any] = {"ignore_eos": True, "outstride": {"method": "plain"}}


def talk(server: Running, count: int, tokens: int, outcomes: list[str]) -> list[threading.Thread]:
    """Clients, every other one streaming, that note how it ended."""

    def one(stream: bool) -> None:
        try:
            with server.client() as client:
                found: Any = client.chat.completions.create(
                    model="tiny",
                    messages=MESSAGES,
                    max_tokens=tokens,
                    stream=stream,
                    extra_body=LONG,
                )
                if stream:
                    for _ in found:
                        pass
            outcomes.append("done")
        except openai.APIStatusError as error:
            outcomes.append(str(error.status_code))
        except openai.APIError as error:
            outcomes.append(f"error: {error.message}")

    threads = [threading.Thread(target=one, args=(bool(i % 2),)) for i in range(count)]
    for thread in threads:
        thread.start()
    return threads


def test_a_killed_engine_comes_back_and_leaves_nobody_waiting(model: Path, tmp_path: Path) -> None:
    options = ("--max-sequences", "3", "--pages", "2048")
    with start(model, tmp_path / "log", *options) as server:
        before = server.engine()
        outcomes: list[str] = []
        threads = talk(server, 6, 3900, outcomes)  # three run, three wait
        server.until("outstride_answers_open", 6)
        time.sleep(0.2)
        os.kill(before, signal.SIGKILL)
        for thread in threads:
            thread.join(10)
        assert not any(thread.is_alive() for thread in threads)
        assert len(outcomes) == 6
        assert all(x == "503" or "engine died" in x for x in outcomes), outcomes
        down = httpx.get(f"{server.url}/ready", timeout=10)
        assert down.status_code == 503
        assert httpx.get(f"{server.url}/health").status_code == 200
        took = server.until_ready()
        assert server.engine() != before
        after: list[str] = []
        for thread in talk(server, 2, 8, after):
            thread.join(30)
        assert after == ["done", "done"]
        assert server.metric("outstride_engine_restarts_total") == 1
        print(f"ready again after {took:.1f} s")
        _told_to_stop(server)


def _told_to_stop(server: Running) -> None:
    """What runs is finished, nobody new comes in, and the exit code is 0."""
    outcomes: list[str] = []
    threads = talk(server, 3, 1500, outcomes)
    server.until("outstride_engine_running", 3)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    try:
        late = httpx.get(f"{server.url}/ready", timeout=5).status_code
    except httpx.TransportError:
        late = 503
    assert late == 503
    for thread in threads:
        thread.join(30)
    assert outcomes == ["done"] * 3
    assert server.process.wait(15) == 0


def test_what_takes_too_long_is_cut_and_told_so(model: Path, tmp_path: Path) -> None:
    options = ("--grace", "0.3", "--pages", "2048")
    with start(model, tmp_path / "log", *options) as server:
        engine = server.engine()
        outcomes: list[str] = []
        threads = talk(server, 2, 3900, outcomes)
        server.until("outstride_engine_running", 2)
        server.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(15)
        assert len(outcomes) == 2
        assert all(x == "503" or "stopping" in x for x in outcomes), outcomes
        assert server.process.wait(15) == 0
        assert not Path(f"/proc/{engine}").exists()


def test_an_engine_does_not_outlive_its_server(model: Path, tmp_path: Path) -> None:
    with start(model, tmp_path / "log") as server:
        engine = server.engine()
        server.process.kill()
        server.process.wait()
        end = time.monotonic() + 10
        while Path(f"/proc/{engine}").exists():
            assert time.monotonic() < end
            time.sleep(0.05)


def test_a_model_that_cannot_be_had_is_an_error_and_not_a_loop(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "outstride.cli", "serve", "--model"]
    found = subprocess.run(
        [*command, str(tmp_path / "nothing")], capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 1
    assert "there is no file or folder" in found.stderr
