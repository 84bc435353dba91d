"""Grammars are compiled next to other work: a large schema delays no request without one."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest

from outstride.core.structured_output import OutputFormat
from outstride.errors import InvalidGrammar
from outstride.grammar.matcher import GrammarCompiler
from outstride.models.tokenizer import Tokenizer
from tests.serve.running import CAP, MESSAGES, Running

LARGE = 4
"""Large schemas that are compiled at the same time."""


def large_schema(number: int) -> dict[str, Any]:
    """A schema of about 46 KB; each number gives another one."""
    fields = {
        f"field_{number}_{i}": {"type": "string", "pattern": f"^[a-z]{{1,{i % 40 + 1}}}(x|y{i})+$"}
        for i in range(600)
    }
    return {
        "type": "object",
        "properties": fields,
        "required": list(fields)[:1],
        "additionalProperties": False,
    }


def post(server: Running, **body: Any) -> tuple[httpx.Response, float]:
    began = time.monotonic()
    values = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0.0} | body
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=values, timeout=CAP)
    return answer, time.monotonic() - began


def test_a_small_request_does_not_wait_for_large_schemas(server: Running) -> None:
    assert 40_000 < len(json.dumps(large_schema(0))) < 64_000
    post(server, guided_choice=["a"])  # builds the compiler itself
    alone = median(post(server)[1] for _ in range(9))
    during: list[float] = []
    with ThreadPoolExecutor(LARGE) as pool:
        began = time.monotonic()
        large = [pool.submit(post, server, guided_json=large_schema(i)) for i in range(LARGE)]
        while not all(future.done() for future in large):
            during.append(post(server)[1])
        elapsed = time.monotonic() - began
    assert all(future.result()[0].status_code == 200 for future in large)
    assert len(during) >= 2
    assert median(during) < max(8 * alone, elapsed / 4), (alone, during, elapsed)


def test_a_small_schema_does_not_wait_for_large_ones(server: Running) -> None:
    """The first schemas here are new; the small one is sent last and answered first."""
    order: list[str] = []

    def ask(name: str, **body: Any) -> None:
        answer, _ = post(server, **body)
        assert answer.status_code == 200, answer.text
        order.append(name)

    threads = [
        threading.Thread(
            target=ask, args=(f"large {i}",), kwargs={"guided_json": large_schema(i + 10)}
        )
        for i in range(LARGE)
    ]
    for thread in threads:
        thread.start()
    ask("small", guided_choice=["yes", "no"], max_tokens=2)
    for thread in threads:
        thread.join()
    assert order.index("small") < LARGE


@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_schema_is_a_400_that_names_the_field(server: Running, stream: bool) -> None:
    wrong = {"type": "array", "uniqueItems": True}
    for field, value in (
        ("guided_json", wrong),
        ("structured_outputs", {"json": wrong}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": wrong}}),
    ):
        answer, _ = post(server, **{field: value, "stream": stream})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field
        assert "uniqueItems" in answer.json()["error"]["message"]


def test_a_client_that_leaves_while_its_schema_compiles(server: Running) -> None:
    with pytest.raises(httpx.TimeoutException):
        httpx.post(
            f"{server.url}/v1/chat/completions",
            json={"messages": MESSAGES, "guided_json": large_schema(99), "max_tokens": 2000},
            timeout=0.01,
        )
    server.until("outstride_num_requests_in_flight", 0)


def test_one_compiler_serves_several_threads(model: Path) -> None:
    tokenizer = Tokenizer.from_folder(model)
    compiler = GrammarCompiler(tokenizer, keep=4)

    def use(number: int) -> bool:
        matcher = compiler.compile(OutputFormat("regex", f"x{{{number % 7 + 1}}}y"))
        with pytest.raises(InvalidGrammar):
            compiler.check(OutputFormat("regex", "(" * (number % 3 + 1)))
        return bool(matcher.allowed([]) is not None)

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(use, range(60)))
