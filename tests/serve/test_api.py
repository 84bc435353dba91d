"""OpenAI's API through OpenAI's own client."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from outstride import LLM, SamplingParams
from tests.serve.running import CAP, MESSAGES, Running, wait_until

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "size": {"enum": [1, 2, 3]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "paint", "description": "Paints.", "parameters": SCHEMA},
    },
    {"type": "function", "function": {"name": "wait", "parameters": {"type": "object"}}},
]


def chat(client: openai.OpenAI, **options: Any) -> Any:
    own = options.pop("own", None)
    extra = options.pop("extra_body", {}) | ({"outstride": own} if own else {})
    values = {"model": "tiny", "messages": MESSAGES, "max_tokens": 24, "temperature": 0.0} | options
    return client.chat.completions.create(**values, extra_body=extra)


def test_a_chat(client: openai.OpenAI, model: Any) -> None:
    found = chat(client, seed=1)
    [choice] = found.choices
    with LLM(str(model)) as llm:
        [alone] = llm.chat(MESSAGES, SamplingParams(max_tokens=24))
        assert found.system_fingerprint == llm.fingerprint
    assert choice.message.content == alone.text
    assert choice.finish_reason == alone.finish_reason
    assert found.object == "chat.completion"
    assert found.usage.completion_tokens == len(alone.token_ids)
    assert found.usage.prompt_tokens == len(alone.prompt_token_ids)
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    own = found.usage.outstride
    assert own["method"] == "auto"
    assert own["emitted"] == found.usage.completion_tokens
    assert own["time_saved"]["estimate"] is True


def test_a_stream_is_the_same_text_with_its_usage(client: openai.OpenAI) -> None:
    whole = chat(client, temperature=0.9, seed=3, n=2)
    texts, reasons = ["", ""], [None, None]
    usage: Any = None
    for chunk in chat(
        client, temperature=0.9, seed=3, n=2, stream=True, stream_options={"include_usage": True}
    ):
        assert usage is None  # it comes last
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_a_stream_without_usage_has_none(client: openai.OpenAI) -> None:
    assert all(chunk.usage is None for chunk in chat(client, stream=True))


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("last", [False, True])
def test_usage_in_every_chunk(client: openai.OpenAI, kind: str, last: bool) -> None:
    options: Any = {"include_usage": last, "continuous_usage_stats": True}
    sampling: Any = {"max_tokens": 12, "n": 2, "temperature": 1.0, "seed": 3}
    stream: Any = (
        chat(client, stream=True, stream_options=options, **sampling)
        if kind == "chat"
        else client.completions.create(
            model="tiny", prompt="the", stream=True, stream_options=options, **sampling
        )
    )
    chunks = list(stream)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] > 0
    assert len(set(counts)) > 3
    for chunk in chunks:
        usage = chunk.usage
        assert usage.prompt_tokens > 0
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert bool(chunks[-1].choices) is not last
    if last:
        assert chunks[-1].usage.outstride["emitted"] == counts[-1] == counts[-2]


def test_one_chunk_per_pass(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}, max_tokens=64))
    assert len(chunks) - 1 <= chunks[-1].usage.outstride["passes"]


@pytest.mark.parametrize("method", ["plain", "ngram", "auto", "mix", "lookahead", "suffix"])
def test_every_exact_method_gives_the_same_text(client: openai.OpenAI, method: str) -> None:
    plain = chat(client, own={"method": "plain"}, temperature=0.8, seed=11, max_tokens=40)
    found = chat(client, own={"method": method}, temperature=0.8, seed=11, max_tokens=40)
    assert found.choices[0].message.content == plain.choices[0].message.content
    assert found.usage.outstride["method"] == method


def test_options_and_trace_of_a_method(client: openai.OpenAI) -> None:
    own = {"method": "ngram", "length": 3, "trace": True}
    found = chat(client, own=own, max_tokens=60)
    trace = found.choices[0].outstride["trace"]
    assert found.usage.outstride["method"] == "ngram:length=3"
    assert len(trace) == found.usage.completion_tokens
    assert {row["kind"] for row in trace} <= {"plain", "drafted", "bonus"}
    drafted = sum(row["kind"] == "drafted" for row in trace)
    assert drafted == found.usage.outstride["accepted"]
    streamed = [
        row
        for chunk in chat(client, own=own, max_tokens=60, stream=True)
        for choice in chunk.choices
        for row in choice.outstride["trace"]
    ]
    assert [row["token"] for row in streamed] == [row["token"] for row in trace]


def test_seeds_stops_and_bias(client: openai.OpenAI) -> None:
    one = chat(client, temperature=1.0, seed=5).choices[0].message.content
    assert one == chat(client, temperature=1.0, seed=5).choices[0].message.content
    assert one != chat(client, temperature=1.0, seed=6).choices[0].message.content
    plain = chat(client, max_tokens=40).choices[0].message.content
    mark = plain[5:7]
    stopped = chat(client, max_tokens=40, stop=[mark, "not there"])
    assert stopped.choices[0].message.content == plain[: plain.index(mark)]
    assert stopped.choices[0].finish_reason == "stop"
    forced = chat(client, logit_bias={"70": 100.0}, max_tokens=4)
    assert len(set(forced.choices[0].message.content)) == 1
    penalized = chat(
        client, logit_bias={"70": 8.0}, max_tokens=12, frequency_penalty=2.0, presence_penalty=2.0
    )
    assert len(set(penalized.choices[0].message.content)) > 1


def test_a_random_seed_is_returned(client: openai.OpenAI) -> None:
    first = chat(client, temperature=1.0)
    seed = first.usage.outstride["seed"]
    again = chat(client, temperature=1.0, seed=seed)
    assert again.choices[0].message.content == first.choices[0].message.content


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    found = chat(client, logprobs=True, top_logprobs=3, own={"method": "ngram"})
    rows = found.choices[0].logprobs.content
    assert len(rows) == found.usage.completion_tokens
    for row in rows:
        assert len(row.top_logprobs) == 3
        assert row.logprob == row.top_logprobs[0].logprob  # greedy
        assert sum(math.exp(top.logprob) for top in row.top_logprobs) <= 1.0 + 1e-5
    streamed = [
        row
        for chunk in chat(client, logprobs=True, top_logprobs=3, stream=True)
        for choice in chunk.choices
        for row in choice.logprobs.content
    ]
    assert [row.logprob for row in streamed] == [row.logprob for row in rows]


def test_loglikelihood_of_evaluation_harnesses(client: openai.OpenAI, model: Any) -> None:
    """Echoed prompts with one token generated; everything but that token is summed up."""
    prompts = [[5, 80, 81, 90, 12, 13], [5, 80, 33, 34]]
    found = client.completions.create(
        model="tiny", prompt=prompts, max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1234
    )
    with LLM(str(model)) as llm:
        for ids, choice in zip(prompts, sorted(found.choices, key=lambda c: c.index), strict=True):
            params = SamplingParams(max_tokens=1, prompt_logprobs=1, logprobs=1)
            [alone] = llm.generate(ids, params)
            rows = alone.prompt_logprobs or []
            logprobs: Any = choice.logprobs
            assert logprobs.token_logprobs[0] is None
            expected = [row.logprob for row in rows if row is not None]
            assert logprobs.token_logprobs[1:-1] == pytest.approx(expected, abs=1e-6)
            assert len(logprobs.tokens) == len(ids) + 1
            for token, own, top in zip(
                logprobs.tokens[1:],
                logprobs.token_logprobs[1:],
                logprobs.top_logprobs[1:],
                strict=True,
            ):
                assert top[token] == own
                assert max(top.values()) >= own


def test_completions(client: openai.OpenAI) -> None:
    both = client.completions.create(
        model="tiny", prompt=["the thing", "in the"], max_tokens=8, n=2, seed=1, temperature=1
    )
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    alone = client.completions.create(
        model="tiny", prompt="in the", max_tokens=8, n=2, seed=1, temperature=1
    )
    assert [c.text for c in both.choices[2:]] == [c.text for c in alone.choices]
    echoed = client.completions.create(model="tiny", prompt="in the", max_tokens=0, echo=True)
    assert echoed.choices[0].text == "in the"
    assert echoed.usage
    assert echoed.usage.completion_tokens == 0
    stream = client.completions.create(
        model="tiny", prompt="in the", max_tokens=8, seed=1, temperature=1, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == alone.choices[0].text


def test_prompt_logprobs(client: openai.OpenAI) -> None:
    found = chat(client, extra_body={"prompt_logprobs": 2}, max_tokens=1)
    rows = found.choices[0].prompt_logprobs
    assert len(rows) == found.usage.prompt_tokens
    assert rows[0] is None
    assert all(row for row in rows[1:])


@pytest.mark.parametrize("method", ["plain", "auto", "ngram"])
def test_json_schemas(client: openai.OpenAI, method: str) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    found = chat(client, response_format=wanted, own={"method": method}, max_tokens=80)
    assert found.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(found.choices[0].message.content), SCHEMA)


def test_other_response_formats(client: openai.OpenAI) -> None:
    formats: list[tuple[dict[str, str], Callable[[str], bool]]] = [
        ({"type": "json_object"}, lambda text: isinstance(json.loads(text), dict)),
        ({"type": "regex", "regex": "(red|blue)-[0-9]{2}"}, lambda text: len(text) in (6, 7)),
        ({"type": "ebnf", "grammar": 'root ::= "yes" | "no"'}, lambda text: text in ("yes", "no")),
        ({"type": "lark", "grammar": 'start: "a"~3'}, lambda text: text == "aaa"),
    ]
    for wanted, matches in formats:
        extra = {"response_format": wanted}
        found = chat(client, extra_body=extra, temperature=1.0, seed=1, max_tokens=60)
        assert matches(found.choices[0].message.content), wanted


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "paint"}}]
)
def test_required_tool_calls(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    found = chat(
        client,
        tools=TOOLS,
        tool_choice=choice,
        max_tokens=90,
        stream=stream,
        temperature=1.0,
        seed=2,
    )
    if stream:
        choices = [chunk.choices[0] for chunk in found if chunk.choices]
        [[call]] = [choice.delta.tool_calls for choice in choices if choice.delta.tool_calls]
        reason = choices[-1].finish_reason
    else:
        assert found.choices[0].message.content is None
        [call], reason = found.choices[0].message.tool_calls, found.choices[0].finish_reason
    assert reason == "tool_calls"
    assert call.id
    arguments = json.loads(call.function.arguments)
    assert call.function.name in ("paint", "wait")
    if call.function.name == "paint":
        jsonschema.validate(arguments, SCHEMA)
    if choice != "required":
        assert call.function.name == "paint"


def test_tool_results_in_a_conversation(client: openai.OpenAI) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "paint", "arguments": "{}"}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "painted"},
    ]
    found = chat(client, messages=messages, tools=TOOLS, tool_choice="auto")
    assert found.choices[0].message.content is not None
    parts = [{"type": "text", "text": "say the thing"}, {"type": "text", "text": " in the box"}]
    same = chat(client, messages=[{"role": "user", "content": parts}])
    assert same.choices[0].message.content == chat(client).choices[0].message.content


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 1000}, "n may be"),
        ({"stop": ["x"] * 100}, "stop strings"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "vocabulary"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ({"own": {"method": "speedy"}}, "unknown method"),
        ({"own": {"method": "ngram", "size": 3}}, "no option 'size'"),
        ({"own": {"method": "ngram", "length": -3}}, "ngram"),
        ({"own": {"method": "draft", "model": "/etc"}}, "--draft-model"),
        ({"own": {"method": "block-drafter", "from": "/etc"}}, "draft head"),
        ({"extra_body": {"temperture": 1}}, "temperture"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text only"),
        ({"tool_choice": "required"}, "no tools"),
        ({"messages": [{"role": "user", "content": "x " * 5000}]}, "tokens"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}},
                }
            },
            "uniqueItems",
        ),
    ],
)
def test_a_wrong_request_is_a_400_that_names_the_cause(
    client: openai.OpenAI, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=named):
        chat(client, **changes)


def test_fields_without_effect_are_accepted(client: openai.OpenAI) -> None:
    fields = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "reasoning_effort": "low",
        "verbosity": "low",
        "modalities": ["text"],
        "prediction": {"type": "content", "content": "the thing"},
    }
    found = chat(client, **fields)
    assert found.choices[0].message.content == chat(client).choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="modalities"):
        chat(client, modalities=["audio"])


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="tiny"):
        chat(client, model="gpt")
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_tokenize_and_detokenize(server: Running) -> None:
    with httpx.Client(base_url=server.url, timeout=CAP) as http:
        found = http.post("/tokenize", json={"prompt": 'the "thing"', "return_token_strs": True})
        assert "".join(found.json()["token_strs"]) == 'the "thing"'
        back = http.post("/detokenize", json={"tokens": found.json()["tokens"]}).json()
        assert back["prompt"] == 'the "thing"'
        chat = http.post("/tokenize", json={"messages": MESSAGES}).json()
        assert chat["count"] == len(chat["tokens"])
        assert http.post("/tokenize", json={}).status_code == 400
        assert http.post("/detokenize", json={"tokens": [10**9]}).status_code == 400


def test_prefixes_are_reused_within_a_cache_salt(client: openai.OpenAI, server: Running) -> None:
    messages = [{"role": "user", "content": "a long story about the thing in the box " * 4}]
    first = chat(client, messages=messages, extra_body={"cache_salt": "one"})
    again = chat(client, messages=messages, extra_body={"cache_salt": "one"})
    other = chat(client, messages=messages, extra_body={"cache_salt": "two"})
    cached = [r.usage.prompt_tokens_details.cached_tokens for r in (first, again, other)]
    assert cached[0] == cached[2] == 0
    assert cached[1] > 100
    assert 0 < server.metric("outstride_prefix_cache_hit_ratio") < 1
    texts = {r.choices[0].message.content for r in (first, again, other)}
    assert len(texts) == 1


def test_state_routes(server: Running) -> None:
    with httpx.Client(base_url=server.url, timeout=CAP) as http:
        assert http.get("/health").json() == {"status": "ok"}
        server.until_ready()
        methods = http.get("/v1/methods").json()["data"]
        assert {"plain", "auto", "ngram"} <= {entry["id"] for entry in methods}
        assert http.get("/nowhere").json()["error"]["message"]
        assert http.get("/openapi.json").json()["info"]["title"] == "Outstride"


def test_the_log_has_no_text_of_requests(client: openai.OpenAI, server: Running) -> None:
    def written() -> list[dict[str, Any]]:
        text = server.log.read_text()
        return [
            json.loads(x)
            for x in text.splitlines(keepends=True)
            if x.startswith("{") and x.endswith("\n")
        ]

    answer = chat(client, messages=[{"role": "user", "content": "my secret is xyzzy"}])

    def lines() -> list[dict[str, Any]]:
        return [line for line in written() if line.get("id") == answer.id]

    wait_until(lambda: bool(lines()), "the line is written, which is after the answer is sent")
    mine = lines()
    assert mine[0]["route"] == "/v1/chat/completions"
    assert mine[0]["status"] == 200
    assert mine[0]["completion_tokens"] > 0
    assert "xyzzy" not in server.log.read_text()
