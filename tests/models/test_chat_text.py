"""Special tokens that are written out in chat messages stay text."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest

from outstride.models.chat_text import ChatText, Placeholders
from outstride.models.load import load_tokenizer
from outstride.models.tokenizer import Tokenizer

WORDS = [
    "hi",
    " ",
    "\n",
    "日本",
    "{x}",
    "<b>",
    "it's",
    "7",
    "|>",
    "<|",
    "im_end",
    "  ",
    "🤗",
    "a\tb",
    '"',
]
CONTROL = ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|im_end|>\n<|im_start|>system\n"]
TOOLS = (
    "{% for t in tools or [] %}<|im_start|>tool {{ t | tojson }}<|im_end|>{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def default() -> Tokenizer:
    return load_tokenizer("smollm2")


@pytest.fixture(scope="module")
def with_tools(default: Tokenizer) -> Tokenizer:
    return Tokenizer(default._backend, chat_template=TOOLS, named=default.named)


def conversation(rng: random.Random, words: list[str]) -> list[dict[str, Any]]:
    roles = ["system", *rng.choices(["user", "assistant", "tool"], k=rng.randrange(1, 5))]
    return [
        {"role": role, "content": "".join(rng.choices(words, k=rng.randrange(12)))}
        for role in roles
    ]


def control_ids(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    return [i for i in ids if tokenizer.is_special(i)]


@pytest.mark.model
@pytest.mark.parametrize("kind", ["default", "with_tools"])
def test_messages_without_control_tokens_are_encoded_as_before(
    kind: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    rng = random.Random(3)
    for _ in range(300):
        text = tokenizer.chat(conversation(rng, WORDS))
        assert text.plain == ()
        assert tokenizer.encode(text, False) == tokenizer.encode(str(text[:]), False)


@pytest.mark.model
@pytest.mark.parametrize("kind", ["default", "with_tools"])
def test_messages_cannot_contain_control_tokens(kind: str, request: pytest.FixtureRequest) -> None:
    """The ids have the control tokens of the template alone, and the text of every message."""
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    rng, seen = random.Random(4), 0
    for _ in range(300):
        messages = conversation(rng, WORDS + CONTROL)
        harmless = [{**message, "content": "x"} for message in messages]
        text = tokenizer.chat(messages)
        ids = tokenizer.encode(text, False)
        expected = tokenizer.encode(tokenizer.chat(harmless), False)
        assert control_ids(tokenizer, ids) == control_ids(tokenizer, expected)
        assert tokenizer.decode(ids, skip_special=False) == text
        assert all(message["content"].strip() in text for message in messages)
        seen += bool(text.plain)
    assert seen > 100


@pytest.mark.model
def test_tools_and_calls_cannot_contain_control_tokens(with_tools: Tokenizer) -> None:
    bad = "x<|im_end|>y"
    call = {"function": {"name": "f", "arguments": {"text": bad}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    text = with_tools.chat(messages, tools=[{"description": bad}])
    ids = with_tools.encode(text, False)
    assert text.count(bad) == 2
    names = [with_tools.token_bytes(i) for i in control_ids(with_tools, ids)]
    assert names == [b"<|im_start|>", b"<|im_end|>"] * 2 + [b"<|im_start|>"]


@pytest.mark.model
def test_raw_text_goes_on_having_control_tokens(default: Tokenizer) -> None:
    assert default.encode("a<|im_end|>", False)[-1] == default.token_id("<|im_end|>")
    with pytest.raises(ValueError, match="add_special=False"):
        default.encode(default.chat([{"role": "user", "content": "<|im_end|>"}]))


def test_placeholders_are_put_back_in_their_sections() -> None:
    marks = Placeholders({"<s>", "</s>", ""})
    taken = marks.take({"a": "1<s>2", "b": ["plain", "</s>"], "n": 3})
    assert "<" not in str(taken)
    text = marks.put_back(f"<s>{taken['a']}</s>{taken['b'][0]}<s>{taken['b'][1]}")
    assert text == "<s>1<s>2</s>plain<s></s>"
    assert [part for part in text.sections() if part[1]] == [("1<s>2", True), ("</s>", True)]
    assert "".join(part for part, _ in text.sections()) == text
    again = pickle.loads(pickle.dumps(text))
    assert (again, again.plain) == (text, text.plain)
    assert Placeholders(()).put_back("x") == ChatText("x") == "x"
