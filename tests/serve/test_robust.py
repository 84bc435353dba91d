"""Unlikely requests: generated from the server's OpenAPI description, and for every method option."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import openai
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok

from outstride import registry
from tests.serve.running import CAP, MESSAGES, Running


def test_no_request_that_the_description_allows_is_a_server_error(server: Running) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    tried = 0

    def check(case: Any) -> None:
        nonlocal tried
        tried += 1
        if isinstance(case.body, dict) and "completions" in case.path:
            for name in ("max_tokens", "max_completion_tokens", "n"):
                if isinstance(case.body.get(name), int):  # short answers suffice
                    case.body[name] = min(case.body[name], 4)
            case.body.setdefault("max_tokens", 4)
        elif isinstance(case.body, dict) and case.path == "/v1/responses":
            case.body["max_output_tokens"] = 4
        case.call_and_validate(checks=[not_a_server_error])

    bounds = settings(
        max_examples=20,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for found in schema.get_all_operations():
        assert isinstance(found, Ok)
        bounds(given(case=found.ok().as_strategy())(check))()
    assert tried > 100
    server.until_ready()


def test_no_option_of_a_method_is_a_server_error(server: Running) -> None:
    """With any value of a method's options, the request is served or refused."""
    registry.discover()
    before = server.metric("outstride_engine_restarts_total")
    with httpx.Client(base_url=server.url, timeout=CAP) as http:
        for entry in registry.entries():
            for option in entry.options:
                for value in (-1, 0, 10**9, 0.5, -1e300, "x", True):
                    body = {
                        "messages": MESSAGES,
                        "max_tokens": 6,
                        "outstride": {"method": entry.name, option.name: value},
                    }
                    found = http.post("/v1/chat/completions", json=body)
                    assert found.status_code in (200, 400), (entry.name, option.name, value)
        server.until_ready()
    assert server.metric("outstride_engine_restarts_total") == before


def bounded(numbers: random.Random, depth: int = 0) -> dict[str, Any]:
    """A random schema whose documents are short."""
    kinds = ["string", "integer", "enum", "boolean", "const", "number"]
    kind = numbers.choice([*kinds, "object", "array", "anyOf"] if depth < 2 else kinds)
    if kind == "string":
        return {"type": "string", "minLength": numbers.randrange(2), "maxLength": 6}
    if kind in ("integer", "number"):
        low = numbers.randrange(-50, 50)
        return {"type": kind, "minimum": low, "maximum": low + numbers.randrange(100)}
    if kind == "enum":
        return {"enum": numbers.sample(["a", "b c", 3, None, True, "é", "\n"], 3)}
    if kind == "boolean":
        return {"type": "boolean"}
    if kind == "const":
        return {"const": numbers.choice(["fixed", 17, ["x", {"y": None}]])}
    if kind == "array":
        items = bounded(numbers, depth + 1)
        return {"type": "array", "items": items, "minItems": 1, "maxItems": 3}
    if kind == "anyOf":
        return {"anyOf": [bounded(numbers, depth + 1) for _ in range(2)]}
    names = numbers.sample(["name", "the", "in", "size", "x-1"], 3)
    return {
        "type": "object",
        "properties": {name: bounded(numbers, depth + 1) for name in names},
        "required": names[: numbers.randrange(1, 4)],
        "additionalProperties": False,
    }


def test_every_answer_matches_its_schema_and_none_is_cut(client: openai.OpenAI) -> None:
    def one(number: int) -> None:
        numbers = random.Random(number)
        schema = {**bounded(numbers), "$schema": "https://json-schema.org/draft/2020-12/schema"}
        try:
            found = client.chat.completions.create(
                model="tiny",
                messages=MESSAGES,
                temperature=1.0,
                seed=number,
                max_tokens=256,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": schema},
                },
            )
        except openai.BadRequestError as error:
            assert "Unsatisfiable" in str(error) or "empty" in str(error), (error, schema)  # noqa: PT017
            return
        [choice] = found.choices
        assert choice.finish_reason == "stop", (schema, choice)
        jsonschema.validate(json.loads(choice.message.content or ""), schema)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(80)))
