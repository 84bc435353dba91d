"""Wrong requests: the answer says what is wrong, in which field, and what was probably meant."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.serve.running import CAP, MESSAGES, Running

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}


def post(server: Running, path: str, content: str | bytes, headers: dict[str, str]) -> Any:
    data = content.encode() if isinstance(content, str) else content
    return httpx.post(
        f"{server.url}{path}", content=data, headers=server.headers | headers, timeout=CAP
    )


def refused(server: Running, path: str, **body: Any) -> dict[str, Any]:
    answer = post(server, path, json.dumps(body), JSON)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


# --- max_tokens -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_chat_needs_at_least_one_token(server: Running, name: str) -> None:
    error = refused(server, CHAT, messages=MESSAGES, **{name: 0})
    assert error["param"] == name
    assert "at least 1" in error["message"]


def test_a_completion_without_tokens_needs_something_about_its_prompt(server: Running) -> None:
    error = refused(server, COMPLETION, prompt="in the", max_tokens=0)
    assert error["param"] == "max_tokens"
    assert "at least 1" in error["message"]
    assert "echo" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_echoed_prompts_with_log_probabilities_and_no_tokens(server: Running, stream: bool) -> None:
    body = {"prompt": "in the", "max_tokens": 0, "echo": True, "logprobs": 0, "stream": stream}
    answer = post(server, COMPLETION, json.dumps(body), JSON)
    assert answer.status_code == 200, answer.text
    if stream:
        events = [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: {")]
        [choice] = [json.loads(event)["choices"][0] for event in events]
    else:
        assert answer.json()["usage"]["completion_tokens"] == 0
        [choice] = answer.json()["choices"]
    assert choice["text"] == "in the"
    assert "".join(choice["logprobs"]["tokens"]) == "in the"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(value < 0 for value in choice["logprobs"]["token_logprobs"][1:])


def test_prompt_logprobs_without_tokens(server: Running) -> None:
    body = {"prompt": "in the", "max_tokens": 0, "prompt_logprobs": 0}
    answer = post(server, COMPLETION, json.dumps(body), JSON)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    assert choice["text"] == ""
    assert len(choice["prompt_logprobs"]) == answer.json()["usage"]["prompt_tokens"]


# --- bodies that are not JSON -----------------------------------------------------------------------


def test_malformed_json_is_located_by_line_and_column(server: Running) -> None:
    answer = post(server, CHAT, '{"model": "tiny",\n "messages" []}', JSON)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] is None
    assert "not valid JSON" in error["message"]
    assert "line 2, column 13" in error["message"]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", "empty"),
        (b"[]", "JSON object"),
        (b"null", "JSON object"),
        (b'"text"', "JSON object"),
        (b'{"messages": "\xff"}', "UTF-8"),
        (b"[" * 100_000, "nested"),
    ],
)
def test_a_body_that_is_no_object(server: Running, body: bytes, named: str) -> None:
    answer = post(server, CHAT, body, JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] is None
    assert named in answer.json()["error"]["message"]


@pytest.mark.parametrize("headers", [{}, {"content-type": "text/plain"}])
def test_the_content_type_must_be_json(server: Running, headers: dict[str, str]) -> None:
    answer = post(server, CHAT, json.dumps({"messages": MESSAGES}), headers)
    assert answer.status_code == 415
    error = answer.json()["error"]
    assert error["param"] is None
    assert "content-type: application/json" in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "named"),
    [
        ('{"messages": [], "temperature": NaN}', "temperature", "NaN"),
        ('{"messages": [], "top_p": -Infinity}', "top_p", "-Infinity"),
        ('{"messages": [], "logit_bias": {"70": 1e999}}', "logit_bias.70", "Infinity"),
        ('{"messages": [{"role": "user", "x": [0, NaN]}]}', "messages.0.x.1", "NaN"),
    ],
)
def test_numbers_must_be_finite(server: Running, body: str, param: str, named: str) -> None:
    answer = post(server, CHAT, body, JSON)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert f"{param} is {named}" in error["message"]
    assert "finite" in error["message"]


# --- fields -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param", "meant"),
    [
        ({"temperture": 1}, "temperture", "temperature"),
        ({"max_token": 5}, "max_token", "max_tokens"),
        (
            {"stream_options": {"include_usge": True}},
            "stream_options.include_usge",
            "include_usage",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "shema": {}}}},
            "response_format.json_schema.shema",
            "schema",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "paramters": {}}}]},
            "tools.0.function.paramters",
            "parameters",
        ),
    ],
)
def test_a_misspelt_field_is_named_with_the_one_that_was_meant(
    server: Running, body: dict[str, Any], param: str, meant: str
) -> None:
    error = refused(server, CHAT, messages=MESSAGES, **body)
    assert error["param"] == param
    assert f"unknown field '{param}'" in error["message"]
    assert f"did you mean '{meant}'?" in error["message"]


def test_an_unknown_field_that_resembles_none(server: Running) -> None:
    error = refused(server, CHAT, messages=MESSAGES, zzz=1)
    assert error["param"] == "zzz"
    assert error["message"] == "unknown field 'zzz'"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "messages", "messages is missing"),
        ({"messages": []}, "messages", "messages must have at least 1 item"),
        ({"stop": 5}, "stop", "stop must be a string or a list"),
        ({"temperature": "hot"}, "temperature", "temperature must be a number"),
        ({"temperature": 200}, "temperature", "temperature must be at most 100"),
        ({"n": 1.5}, "n", "n must be an integer"),
        ({"stream": "yes"}, "stream", "stream must be true or false"),
        ({"messages": [{"role": "usr"}]}, "messages.0.role", "messages.0.role must be 'system', "),
    ],
)
def test_a_wrong_value_is_described_by_its_field(
    server: Running, body: dict[str, Any], param: str, message: str
) -> None:
    error = refused(server, CHAT, **({"messages": MESSAGES} if body else {}) | body)
    assert error["param"] == param
    assert error["message"].startswith(message)


def test_a_wrong_prompt_names_no_alternatives_of_its_type(server: Running) -> None:
    error = refused(server, COMPLETION, prompt=[{}])
    assert error["param"] == "prompt.0"
    assert "tagged" not in error["message"]


def test_a_wrong_proof_is_refused_the_same_way(server: Running) -> None:
    error = refused(server, "/v1/outstride/prove", messages=MESSAGES, max_tokens=0)
    assert error["param"] == "max_tokens"
    error = refused(server, "/v1/outstride/prove", messages=MESSAGES, tmperature=1)
    assert "did you mean 'temperature'?" in error["message"]
