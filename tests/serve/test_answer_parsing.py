"""Reasoning and tool calls in answers: each family's notation, whole and cut at every character."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outstride.serve.parsing.answer import TOOL_FORMATS, AnswerFormats
from outstride.serve.parsing.tool_format import Part

TOOLS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
    "stop": {"type": "object", "properties": {}},
}
PARIS = ("weather", {"city": "Paris", "days": 3})
OSLO = ("weather", {"city": 'Oslo "N" {]} </tool_call>', "days": 1})
STOP: tuple[str, Any] = ("stop", {})


def joined(parts: list[Part]) -> list[Part]:
    """Neighbouring parts of text as one."""
    found: list[Part] = []
    for (kind, name), group in groupby(parts, key=lambda part: (part.kind, part.name)):
        if kind == "call":
            found += group
        else:
            found.append(Part(kind, "".join(part.text for part in group), name))
    return found


def parse(
    formats: AnswerFormats, text: str, cuts: list[int], prompt: str = "", tools: Any = TOOLS
) -> list[Part]:
    parser = formats.parser(prompt, tools, constrained=False)
    if parser is None:
        return [Part("content", text)] if text else []
    parts, last = [], 0
    for cut in [*cuts, len(text)]:
        parts += parser.feed(text[last:cut])
        last = cut
    return joined(parts + parser.feed("", final=True))


def same_however_cut(formats: AnswerFormats, text: str, prompt: str = "") -> list[Part]:
    """Parses a text whole, at every single cut, and character by character."""
    parser = formats.parser(prompt, TOOLS, constrained=False)
    assert parser is not None
    whole = joined(parser.feed(text, final=True))
    assert parse(formats, text, list(range(1, len(text))), prompt) == whole
    for cut in range(1, len(text)):
        assert parse(formats, text, [cut], prompt) == whole, cut
    return whole


def calls_of(parts: list[Part]) -> list[tuple[str, Any]]:
    return [(part.name, json.loads(part.text)) for part in parts if part.kind == "call"]


def text_of(parts: list[Part], kind: str = "content") -> str:
    return "".join(part.text for part in parts if part.kind == kind)


def as_json(call: tuple[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]})


def deepseek_v3(call: tuple[str, Any]) -> str:
    inner = f"function<｜tool▁sep｜>{call[0]}\n```json\n{json.dumps(call[1])}\n```"
    return f"<｜tool▁call▁begin｜>{inner}<｜tool▁call▁end｜>"


def deepseek_v31(call: tuple[str, Any]) -> str:
    return f"<｜tool▁call▁begin｜>{call[0]}<｜tool▁sep｜>{json.dumps(call[1])}<｜tool▁call▁end｜>"


def glm(call: tuple[str, Any]) -> str:
    pairs = "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in call[1].items()
    )
    return f"<tool_call>{call[0]}\n{pairs}</tool_call>"


def coder(call: tuple[str, Any]) -> str:
    pairs = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in call[1].items())
    return f"<tool_call>\n<function={call[0]}>\n{pairs}</function>\n</tool_call>"


def gemma(call: tuple[str, Any], quote: str) -> str:
    pairs = ",".join(
        f"{k}:{quote}{v}{quote}" if isinstance(v, str) else f"{k}:{json.dumps(v)}"
        for k, v in call[1].items()
    )
    return f"call:{call[0]}{{{pairs}}}"


def python(call: tuple[str, Any]) -> str:
    return f"{call[0]}({', '.join(f'{k}={v!r}' for k, v in call[1].items())})"


WRITTEN: list[tuple[str, str, list[tuple[str, Any]], str]] = [
    ("hermes", f"<tool_call>\n{as_json(PARIS)}\n</tool_call>", [PARIS], ""),
    (
        "hermes",
        f"Let me see.\n<tool_call>{as_json(OSLO)}</tool_call>\n<tool_call>{as_json(STOP)}",
        [OSLO, STOP],
        "Let me see.",
    ),
    ("hermes", as_json(PARIS), [PARIS], ""),
    ("hermes", f"[{as_json(PARIS)}, {as_json(STOP)}]", [PARIS, STOP], ""),
    ("llama3", as_json(PARIS, "parameters"), [PARIS], ""),
    (
        "llama3",
        f"{as_json(PARIS, 'parameters')}; {as_json(STOP, 'parameters')}",
        [PARIS, STOP],
        "",
    ),
    ("llama3", f"<|python_tag|>{as_json(OSLO, 'parameters')}", [OSLO], ""),
    ("mistral", f"[TOOL_CALLS][{as_json(PARIS)}, {as_json(STOP)}]", [PARIS, STOP], ""),
    (
        "mistral",
        f"Well.[TOOL_CALLS]weather{json.dumps(OSLO[1])}[TOOL_CALLS]stop[ARGS]{{}}",
        [OSLO, STOP],
        "Well.",
    ),
    (
        "deepseek",
        "Look:\n<｜tool▁calls▁begin｜>"
        + deepseek_v3(PARIS)
        + "\n"
        + deepseek_v3(STOP)
        + "<｜tool▁calls▁end｜>",
        [PARIS, STOP],
        "Look:",
    ),
    (
        "deepseek",
        f"<｜tool▁calls▁begin｜>{deepseek_v31(OSLO)}{deepseek_v31(STOP)}<｜tool▁calls▁end｜>",
        [OSLO, STOP],
        "",
    ),
    ("granite", f"<|tool_call|>[{as_json(PARIS)}, {as_json(STOP)}]", [PARIS, STOP], ""),
    ("granite", f"<function_call> {as_json(PARIS)}", [PARIS], ""),
    ("phi4", f"functools[{as_json(PARIS)}]", [PARIS], ""),
    ("phi4", f"<|tool_call|>[{as_json(OSLO)}]<|/tool_call|>", [OSLO], ""),
    ("glm", f"I will look.\n{glm(PARIS)}\n{glm(STOP)}", [PARIS, STOP], "I will look."),
    ("qwen3-coder", f"Sure.\n\n{coder(PARIS)}\n{coder(STOP)}", [PARIS, STOP], "Sure."),
    (
        "gemma",
        f"<start_function_call>{gemma(PARIS, '<escape>')}<end_function_call>",
        [PARIS],
        "",
    ),
    (
        "gemma",
        f"<|tool_call>{gemma(OSLO, chr(60) + '|' + chr(34) + '|>')}<tool_call|>",
        [OSLO],
        "",
    ),
    ("gemma", f"Now:\n```tool_code\n{python(PARIS)}\n```", [PARIS], "Now:"),
    ("pythonic", f"[{python(PARIS)}, {python(STOP)}]", [PARIS, STOP], ""),
    ("pythonic", f"<function_calls>\n{python(PARIS)}\n</function_calls>", [PARIS], ""),
]
HARMONY = (
    "<|channel|>analysis<|message|>The user wants weather.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>Looking.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    f"{json.dumps(PARIS[1])}"
)


@pytest.mark.parametrize(("name", "text", "calls", "content"), WRITTEN)
def test_each_notation(name: str, text: str, calls: Any, content: str) -> None:
    found = same_however_cut(AnswerFormats(name, "none"), text)
    assert calls_of(found) == calls
    assert text_of(found) == content


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
@pytest.mark.parametrize(
    "text",
    [
        "The weather is fine, {really}.\n\n- one\n- two  \n",
        "  \n",
        '{"name": "unknown", "arguments": {}}',
        '{"temperature": 20}\nThat is all.',
        "<tool_call>not a call</tool_call> and more",
        "<tool_call>",
        '<tool_call>{"name": "weather", "arguments": {"city": "Pa',
        "[TOOL_CALLS] nothing",
        "<function=weather",
        "a <| b <｜ c ``` d",
        "[1, 2, 3]",
    ],
)
def test_what_is_no_call_stays_as_it_is(name: str, text: str) -> None:
    found = same_however_cut(AnswerFormats(name, "none"), text)
    assert calls_of(found) == []
    assert text_of(found) == text


PIECES = ["<think>", "</think>", "a", " ", "\n", "<", "{", "}", '"', "<tool_call>", "</tool_call>"]
PIECES += [as_json(PARIS), "[TOOL_CALLS]", "[", "]", ";", "<function=", "weather", "</function>"]
PIECES += ["<arg_key>", "<|channel|>analysis", "<|message|>", "<|end|>", "<|start|>", "<|call|>"]
PIECES += [
    "<|channel|>commentary to=functions.stop",
    "<|tool_call|>",
    "functools",
    "<|python_tag|>",
]


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from([*sorted(TOOL_FORMATS), "harmony"]),
    reasoning=st.sampled_from(["think", "none", "harmony"]),
    pieces=st.lists(st.sampled_from(PIECES), max_size=12),
    prompt=st.sampled_from(["", "<|im_start|>assistant\n<think>\n"]),
    data=st.data(),
)
def test_the_result_does_not_depend_on_the_cuts(
    name: str, reasoning: str, pieces: list[str], prompt: str, data: st.DataObject
) -> None:
    formats, text = AnswerFormats(name, reasoning), "".join(pieces)
    parser = formats.parser(prompt, TOOLS, constrained=False)
    assert parser is not None
    whole = joined(parser.feed(text, final=True))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    assert parse(formats, text, cuts, prompt) == whole
    assert parse(formats, text, list(range(len(text))), prompt) == whole


# --- reasoning --------------------------------------------------------------------------------------

THINK = AnswerFormats("hermes", "think")


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        ("", "<think>\nHm, < 3.\n</think>\n\nYes.", "Hm, < 3.", "Yes."),
        ("", "\n<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("", "No marker: <think> is text.", "", "No marker: <think> is text."),
        ("...<think>\n", "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("...<think>\n", "<think>\nHm.</think>Yes.", "Hm.", "Yes."),
        ("...<think>\n\n</think>\n\n", "Yes.", "", "Yes."),
        ("", "<think>cut off </thi", "cut off </thi", ""),
        ("", "", "", ""),
    ],
)
def test_reasoning_between_tags(prompt: str, text: str, reasoning: str, content: str) -> None:
    found = same_however_cut(THINK, text, prompt)
    assert text_of(found, "reasoning") == reasoning
    assert text_of(found) == content


def test_a_call_after_reasoning() -> None:
    text = (
        f"<think>\nI could call <tool_call>.\n</think>\n\n<tool_call>{as_json(PARIS)}</tool_call>"
    )
    found = same_however_cut(THINK, text)
    assert text_of(found, "reasoning") == "I could call <tool_call>."
    assert calls_of(found) == [PARIS]
    assert text_of(found) == ""


def test_harmony() -> None:
    formats = AnswerFormats("harmony", "harmony")
    found = same_however_cut(formats, HARMONY)
    assert text_of(found, "reasoning") == "The user wants weather."
    assert text_of(found) == "Looking."
    assert calls_of(found) == [PARIS]
    final = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    )
    found = same_however_cut(formats, final)
    assert text_of(found, "reasoning") == "Hm."
    assert text_of(found) == "Yes."
    assert text_of(same_however_cut(formats, "Plain text.")) == "Plain text."


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ messages }}", "hermes", "none"),
        ("<tool_call>{{ tool.name }}</tool_call>", "hermes", "none"),
        ("<tool_call>...</tool_call>{% if thinking %}<think>{% endif %}", "hermes", "think"),
        ("<tool_call><function=...>", "qwen3-coder", "none"),
        ("<tool_call>{{ name }}<arg_key> ... </think>", "glm", "think"),
        ("[TOOL_CALLS] [THINK]", "mistral", "mistral"),
        ("<|start_header_id|>{{ role }}", "llama3", "none"),
        ("<｜tool▁calls▁begin｜> </think>", "deepseek", "think"),
        ("<|tool_call|>", "granite", "none"),
        ("<|tool_call|>...<|/tool_call|>", "phi4", "none"),
        ("<|tool_call>call: <|channel>thought", "gemma", "gemma"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony", "harmony"),
    ],
)
def test_the_chat_template_chooses(template: str, tools: str, reasoning: str) -> None:
    assert AnswerFormats.choose(template) == AnswerFormats(tools, reasoning)
    assert AnswerFormats.choose(template, "granite", "none") == AnswerFormats("granite", "none")


def test_a_constrained_answer_is_json_and_has_no_reasoning() -> None:
    formats = AnswerFormats("glm", "think")
    assert formats.parser("...<think>", {}, constrained=True) is None
    parser = formats.parser("...<think>", TOOLS, constrained=True)
    assert parser is not None
    assert calls_of(parser.feed(as_json(PARIS), final=True)) == [PARIS]
