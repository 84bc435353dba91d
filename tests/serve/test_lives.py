"""Engines that die, servers that are stopped by a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import openai

from tests.serve.running import CAP, MESSAGES, Running, start, wait_until

LONG: dict[str, Any] = {"ignore_eos": True, "outstride": {"method": "plain"}}


def ask(server: Running, count: int, tokens: int, outcomes: list[str]) -> list[threading.Thread]:
    """Starts clients, every other one streaming; each appends how its request ended."""

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


def test_a_killed_engine_is_restarted_and_its_requests_get_an_error(
    model: Path, tmp_path: Path
) -> None:
    options = ("--max-sequences", "3", "--pages", "2048")
    with start(model, tmp_path / "log", *options, slow=True) as server:
        before = server.engine()
        outcomes: list[str] = []
        threads = ask(server, 6, 3900, outcomes)  # three run, three wait
        server.until("outstride_num_requests_in_flight", 6)
        server.until("outstride_num_requests_running", 3)
        os.kill(before, signal.SIGKILL)
        for thread in threads:
            thread.join(CAP)
        assert not any(thread.is_alive() for thread in threads)
        assert len(outcomes) == 6
        assert all(x == "503" or "engine died" in x for x in outcomes), outcomes
        took = server.until_ready()
        assert server.engine() != before
        after: list[str] = []
        for thread in ask(server, 2, 8, after):
            thread.join(CAP)
        assert after == ["done", "done"]
        assert server.metric("outstride_engine_restarts_total") == 1
        print(f"ready again after {took:.1f} s")


def test_a_server_whose_engine_does_not_answer_is_healthy_but_not_ready(
    model: Path, tmp_path: Path
) -> None:
    """A stopped engine process answers no ping; /ready waits 5 s for one."""
    with start(model, tmp_path / "log") as server:
        os.kill(server.engine(), signal.SIGSTOP)
        assert httpx.get(f"{server.url}/ready", timeout=CAP).status_code == 503
        assert httpx.get(f"{server.url}/health", timeout=CAP).status_code == 200
        os.kill(server.engine(), signal.SIGCONT)
        server.until_ready()


def test_a_signal_lets_running_requests_finish(model: Path, tmp_path: Path) -> None:
    """The engine is stopped meanwhile, so that requests cannot end before the signal comes."""
    with start(model, tmp_path / "log", "--pages", "2048", "--grace", str(CAP)) as server:
        engine = server.engine()
        os.kill(engine, signal.SIGSTOP)
        outcomes: list[str] = []
        threads = ask(server, 3, 40, outcomes)
        server.until("outstride_num_requests_in_flight", 3)
        server.process.send_signal(signal.SIGTERM)

        def refuses() -> bool:
            try:
                return httpx.get(f"{server.url}/ready", timeout=CAP).status_code == 503
            except httpx.TransportError:  # it no longer listens
                return True

        wait_until(refuses, "new requests are refused")
        assert outcomes == []
        os.kill(engine, signal.SIGCONT)
        for thread in threads:
            thread.join(CAP)
        assert outcomes == ["done"] * 3
        assert server.process.wait(CAP) == 0


def test_requests_that_outlast_the_grace_period_get_an_error(model: Path, tmp_path: Path) -> None:
    options = ("--grace", "0.3", "--pages", "2048")
    with start(model, tmp_path / "log", *options, slow=True) as server:
        engine = server.engine()
        outcomes: list[str] = []
        threads = ask(server, 2, 3900, outcomes)
        server.until("outstride_num_requests_running", 2)
        server.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(CAP)
        assert len(outcomes) == 2
        assert all(x == "503" or "stopping" in x for x in outcomes), outcomes
        assert server.process.wait(CAP) == 0
        assert not Path(f"/proc/{engine}").exists()


def test_an_engine_does_not_outlive_its_server(model: Path, tmp_path: Path) -> None:
    with start(model, tmp_path / "log") as server:
        engine = server.engine()
        server.process.kill()
        server.process.wait()
        wait_until(lambda: not Path(f"/proc/{engine}").exists(), "the engine process ends")


def test_a_model_that_cannot_be_loaded_is_an_error_and_not_a_loop(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "outstride.cli", "serve", "--model"]
    found = subprocess.run(
        [*command, str(tmp_path / "nothing")], capture_output=True, text=True, timeout=CAP
    )
    assert found.returncode == 1
    assert "there is no file or folder" in found.stderr
