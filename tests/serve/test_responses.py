"""`/v1/responses` through OpenAI's own client, and the store of responses."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from outstride.serve.parsing.tool_format import Part
from outstride.serve.responses_api import ResponseStore, StoredResponse
from outstride.serve.responses_output import ResponseState
from outstride.serve.responses_protocol import InputItem, ResponsesBody, to_messages
from outstride.serve.settings import APIError
from outstride.serve.validation import validated
from tests.serve.running import CAP, MESSAGES, Running, wait_until
from tests.serve.test_api import SCHEMA, chat

TEXT = MESSAGES[0]["content"]
TOOLS: Any = [{"type": "function", "name": "paint", "description": "Paints.", "parameters": SCHEMA}]


def create(client: openai.OpenAI, **options: Any) -> Any:
    values = {"model": "tiny", "input": TEXT, "max_output_tokens": 24, "temperature": 0.0}
    return client.responses.create(**values | options)


def test_the_text_is_that_of_a_chat(client: openai.OpenAI) -> None:
    found = create(client)
    expected = chat(client)
    assert found.output_text == expected.choices[0].message.content
    assert found.object == "response"
    assert found.id.startswith("resp_")
    assert found.usage.input_tokens == expected.usage.prompt_tokens
    assert found.usage.output_tokens == expected.usage.completion_tokens
    cut = expected.choices[0].finish_reason == "length"
    assert found.status == ("incomplete" if cut else "completed")
    assert found.usage.to_dict()["outstride"]["method"] == "auto"


def test_a_short_answer_is_incomplete(client: openai.OpenAI) -> None:
    found = create(client, max_output_tokens=2, extra_body={"outstride": {"method": "plain"}})
    assert found.status == "incomplete"
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.usage.output_tokens == 2


def test_a_stream_has_the_official_events(client: openai.OpenAI) -> None:
    events = list(create(client, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:-1] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    whole = create(client)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    assert kinds.count("response.output_text.delta") > 1
    wanted: Any = {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA}}
    options: Any = {"model": "tiny", "input": TEXT, "max_output_tokens": 90, "text": wanted}
    with client.responses.stream(**options) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output[0].type == "message"


def test_instructions_and_items(client: openai.OpenAI) -> None:
    parts = [{"type": "input_text", "text": TEXT}]
    items: Any = [{"role": "user", "content": parts}]
    found = create(client, input=items, instructions="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    assert found.output_text == chat(client, messages=messages).choices[0].message.content
    assert found.instructions == "Be brief."


def test_a_conversation_goes_on(client: openai.OpenAI) -> None:
    first = create(client)
    second = create(client, input="and then?", previous_response_id=first.id)
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "and then?"},
    ]
    assert second.output_text == chat(client, messages=messages).choices[0].message.content
    assert second.previous_response_id == first.id
    third = create(client, input="and?", previous_response_id=second.id)
    assert third.usage.input_tokens > second.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    assert [i.content for i in client.responses.input_items.list(second.id)] == ["and then?"]  # type: ignore[union-attr]
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    with pytest.raises(openai.NotFoundError, match="no response"):
        create(client, previous_response_id=second.id)
    unstored = create(client, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


def test_functions_round_trip(client: openai.OpenAI) -> None:
    options: Any = {"tools": TOOLS, "tool_choice": "required", "max_output_tokens": 90}
    found = create(client, **options)
    [call] = found.output
    assert call.type == "function_call"
    assert call.name == "paint"
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    answer = {"type": "function_call_output", "call_id": call.call_id, "output": "painted"}
    after = create(client, input=[answer], previous_response_id=found.id, tools=TOOLS)
    assert after.output
    given = [{"role": "user", "content": TEXT}, call.to_dict(), answer]
    same = create(client, input=given, tools=TOOLS)
    assert same.output_text == after.output_text
    events = list(create(client, stream=True, **options))
    kinds = [event.type for event in events]
    assert kinds[2:6] == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    [item] = events[-1].response.output
    assert (item.name, item.arguments) == (call.name, call.arguments)
    named = create(client, **options | {"tool_choice": {"type": "function", "name": "paint"}})
    assert named.output[0].name == "paint"


def test_text_formats(client: openai.OpenAI) -> None:
    wanted: Any = {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA}}
    found = create(client, text=wanted, max_output_tokens=90)
    jsonschema.validate(json.loads(found.output_text), SCHEMA)
    assert found.text.format.type == "json_schema"
    plain: Any = {"format": {"type": "json_object"}}
    found = create(client, text=plain, max_output_tokens=60)
    assert isinstance(json.loads(found.output_text), dict)


def test_the_background(client: openai.OpenAI) -> None:
    found = create(client, background=True, max_output_tokens=8)
    assert found.status == "in_progress"
    wait_until(lambda: client.responses.retrieve(found.id).status != "in_progress", "it has ended")
    done = client.responses.retrieve(found.id)
    assert done.output_text == create(client, max_output_tokens=8).output_text
    assert client.responses.cancel(found.id).status == done.status
    long = create(
        client,
        background=True,
        max_output_tokens=3000,
        extra_body={"outstride": {"method": "plain"}},
        temperature=1.0,
    )
    assert client.responses.cancel(long.id).status in ("cancelled", "completed")


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({}, "input", "missing"),
        ({"input": []}, "input", "empty"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "item_reference"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input", "lacks"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input",
            "text only",
        ),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools", "web_search"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice", "no tools"),
        ({"input": "a", "background": True, "stream": True}, "background", "stream"),
        ({"input": "a", "background": True, "store": False}, "background", "stored"),
        ({"input": "x " * 5000}, "input", "tokens"),
        ({"input": "a", "max_tokens": 5}, "max_tokens", "unknown field"),
        (
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "x"}}},
            "text",
            "schema",
        ),
    ],
)
def test_wrong_requests(server: Running, fields: dict[str, Any], param: str, named: str) -> None:
    answer = httpx.post(f"{server.url}/v1/responses", json=fields, timeout=CAP)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert named in error["message"]


# --- without a server -------------------------------------------------------------------------------


def stored(text: str) -> StoredResponse:
    state = ResponseState(validated(ResponsesBody, {"input": "a"}), "m")
    state.add(Part("content", text))
    return StoredResponse(state, [{"role": "user", "content": "a"}], [])


def test_the_store_is_bounded_and_separates_tenants() -> None:
    store = ResponseStore(max_responses=3, max_bytes=10_000)
    kept = [stored("x") for _ in range(5)]
    for item in kept:
        store.put("t", item)
    for item in kept[:2]:
        with pytest.raises(APIError, match="no response"):
            store.get("t", item.state.id)
    assert store.get("t", kept[4].state.id) is kept[4]
    with pytest.raises(APIError):
        store.get("u", kept[4].state.id)
    store.put("t", stored("y" * 9000))
    store.put("t", stored("y" * 9000))
    with pytest.raises(APIError):
        store.get("t", kept[4].state.id)
    store.put("t", stored("y" * 20_000))  # larger than everything: it is not kept
    assert store.pop("t", "nothing") is None


def test_items_become_messages() -> None:
    items = [
        {"role": "user", "content": "one"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": "2"},
    ]
    found = to_messages([InputItem.model_validate(item) for item in items])
    assert [m["role"] for m in found] == ["user", "assistant", "tool", "tool"]
    assert [c["id"] for c in found[1]["tool_calls"]] == ["c1", "c2"]
    assert found[1]["reasoning_content"] == "hm"


def test_reasoning_and_calls_are_items_of_their_own() -> None:
    state = ResponseState(validated(ResponsesBody, {"input": "a"}), "m")
    events = state.begin()
    parts = [
        Part("reasoning", "h"),
        Part("reasoning", "m"),
        Part("content", "Yes"),
        Part("call", "{}", "f"),
    ]
    for part in parts:
        events += state.add(part)
    assert [item["type"] for item in state.output] == ["reasoning", "message", "function_call"]
    assert state.output[0]["content"][0]["text"] == "hm"
    added = [e["output_index"] for e in events if e["type"] == "response.output_item.added"]
    done = [e["output_index"] for e in events if e["type"] == "response.output_item.done"]
    assert added == done == [0, 1, 2]
    [message] = state.to_messages()
    assert message["content"] == "Yes"
    assert message["tool_calls"][0]["function"]["name"] == "f"
