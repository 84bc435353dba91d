"""Batch files: complete, interrupted, wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outstride.errors import InvalidParams
from outstride.serve import batch
from tests.serve.running import CAP, MESSAGES, slow_engine, wait_until


def request(number: int, **body: Any) -> dict[str, Any]:
    values = {"model": "any", "messages": MESSAGES, "max_tokens": 20, "seed": number, **body}
    return {
        "custom_id": f"r{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": values,
    }


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def command(model: Path, source: Path, out: Path) -> list[str]:
    start = [sys.executable, "-m", "outstride.cli", "batch", str(source), str(out)]
    return [*start, "--model", str(model), "--max-sequences", "2", "--pages", "1024"]


def answers(path: Path) -> dict[str, Any]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    names = [line["custom_id"] for line in found]
    assert len(names) == len(set(names))
    return {line["custom_id"]: line["response"] for line in found}


def test_a_killed_run_continues(model: Path, tmp_path: Path) -> None:
    lines = [request(i, max_tokens=600, ignore_eos=True, temperature=1.0) for i in range(8)]
    lines[5]["body"]["temperature"] = "hot"
    lines.append({**request(9), "url": "/v1/completions"})
    lines[-1]["body"] = {"prompt": "the thing", "max_tokens": 3}
    source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    process = subprocess.Popen(
        command(model, source, out),
        stderr=subprocess.DEVNULL,
        env={**os.environ, **slow_engine()},
    )

    def two_answers() -> bool:
        assert process.poll() is None
        return out.exists() and out.read_text().count("\n") >= 2

    wait_until(two_answers, "two requests are answered")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with out.open("a") as file:
        file.write('{"custom_id": "r7", "respon')  # as a crash leaves it
    first = {k: v for k, v in answers_so_far(out).items() if v["status_code"] == 200}
    assert 0 < len(first) < len(lines)
    again = subprocess.run(
        command(model, source, out), capture_output=True, text=True, timeout=CAP, check=False
    )
    assert again.returncode == 1  # one request is wrong
    assert "9 of 9" in again.stderr
    found = answers(out)
    assert set(found) == {line["custom_id"] for line in lines}
    assert found["r5"]["status_code"] == 400
    assert "temperature" in found["r5"]["body"]["error"]["message"]
    for name, response in first.items():  # not run again
        assert found[name] == response
    for name, response in found.items():
        if name != "r5":
            assert response["status_code"] == 200
            assert response["body"]["usage"]["completion_tokens"] in (600, 3)


def answers_so_far(path: Path) -> dict[str, Any]:
    found = {}
    for line in path.read_text().splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        found[value["custom_id"]] = value["response"]
    return found


def test_server_errors_are_tried_again(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write(
        out,
        [
            {"custom_id": "a", "response": {"status_code": 200}},
            {"custom_id": "b", "response": {"status_code": 503}},
            {"custom_id": "c", "response": {"status_code": 400}},
        ],
    )
    assert batch.resume(out) == {"a": 200, "c": 400}
    assert set(answers(out)) == {"a", "c"}
    assert batch.resume(tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "line 1: not JSON"),
        ('{"custom_id": "a"}', "body"),
        ('{"body": {}, "url": "/v1/completions"}', "custom_id"),
        ('{"body": {}, "custom_id": "a", "url": "/v1/embeddings"}', "url"),
        ('{"body":{},"custom_id":"a","url":"/v1/completions"}\n' * 2, "line 2: .*twice"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_runs(
    tmp_path: Path, text: str, named: str
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidParams, match=named):
        batch.read(path)
