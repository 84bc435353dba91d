"""Reasoning, content and calls in chat completions: chunks add up to the whole answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outstride import SamplingParams
from outstride.core.sequence import SequenceCounts
from outstride.models.tokenizer import Tokenizer
from outstride.serve.ipc import EngineOutput, EngineRequest, RequestEnd
from outstride.serve.parsing.answer import AnswerFormats
from outstride.serve.requests import ParsedRequest
from outstride.serve.responses import ResponseBuilder

CALL = '<tool_call>\n{"name": "paint", "arguments": {"size": 2}}\n</tool_call>'
TEXT = f"<think>\nLet me paint.\n</think>\n\nOf course.\n{CALL}\n{CALL}"
COUNTS = {name: getattr(SequenceCounts(), name) for name in SequenceCounts.__slots__}


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_folder(model)


def builder(tokenizer: Tokenizer, formats: AnswerFormats, stream: bool) -> ResponseBuilder:
    request = EngineRequest(id=0, tokens=[1, 2], params=SamplingParams(), method="plain")
    parsed = ParsedRequest(
        engine_requests=[request],
        samples=1,
        stream=stream,
        include_usage=False,
        continuous_usage=False,
        trace=False,
        graphs=False,
        deadline=1.0,
        chat=True,
        answer_parser=lambda: formats.parser("", {"paint": {}}, constrained=False),
    )
    return ResponseBuilder(parsed, tokenizer, "m", "f")


def outputs(text: str, size: int) -> list[EngineOutput]:
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    found = [EngineOutput(1, text=piece) for piece in pieces]
    end = RequestEnd("stop", COUNTS, 0, "plain", 0.0, [3])
    return [*found, EngineOutput(1, end=end, done=True)]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_chunks_add_up(tokenizer: Tokenizer, size: int) -> None:
    formats = AnswerFormats("hermes", "think")
    whole = builder(tokenizer, formats, stream=False)
    for output in outputs(TEXT, 1000):
        whole.add(0, output)
    [choice] = whole.whole()["choices"]
    message = choice["message"]
    assert message["reasoning_content"] == "Let me paint."
    assert message["content"] == "Of course."
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["paint", "paint"]
    assert choice["finish_reason"] == "tool_calls"
    streamed = builder(tokenizer, formats, stream=True)
    deltas: list[dict[str, Any]] = []
    for output in outputs(TEXT, size):
        for chunk in streamed.chunks(streamed.add(0, output), output):
            [found] = json.loads(chunk)["choices"]
            deltas.append(found["delta"])
    assert deltas[0]["role"] == "assistant"
    assert all("role" not in delta for delta in deltas[1:])
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == message[name]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0, 1]
    assert [call["function"] for call in calls] == [c["function"] for c in message["tool_calls"]]
    assert len({call["id"] for call in calls}) == 2


def test_an_answer_with_calls_only_has_no_content(tokenizer: Tokenizer) -> None:
    whole = builder(tokenizer, AnswerFormats("hermes", "none"), stream=False)
    for output in outputs(CALL, 4):
        whole.add(0, output)
    [choice] = whole.whole()["choices"]
    assert choice["message"]["content"] is None
    assert "reasoning_content" not in choice["message"]


def test_an_answer_that_only_thinks_is_empty(tokenizer: Tokenizer) -> None:
    whole = builder(tokenizer, AnswerFormats("hermes", "think"), stream=False)
    for output in outputs("<think>still thinking", 4):
        whole.add(0, output)
    [choice] = whole.whole()["choices"]
    assert choice["message"]["content"] == ""
    assert choice["message"]["reasoning_content"] == "still thinking"
