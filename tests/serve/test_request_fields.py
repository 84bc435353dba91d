"""Request fields that are not OpenAI's: templates, prompts, structured outputs, text, token ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from outstride.models.tokenizer import Tokenizer
from outstride.serve.chat_prompts import chat_text
from outstride.serve.protocol import ChatMessage
from outstride.serve.settings import APIError
from tests.serve.running import CAP, MESSAGES, Running
from tests.serve.test_api import SCHEMA, chat

TOOLS_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments SHOWN }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ mood or '' }}{% endif %}"
)


def post(server: Running, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=CAP)
    assert answer.status_code == 200, answer.text
    return answer.json()


def complete(server: Running, prompt: Any = "in the", **body: Any) -> dict[str, Any]:
    values = {"prompt": prompt, "max_tokens": 12, "temperature": 0.0} | body
    choice: dict[str, Any] = post(server, "/v1/completions", **values)["choices"][0]
    return choice


# --- chat templates ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    found = Tokenizer.from_folder(model)
    found.chat_template = TOOLS_TEMPLATE.replace("SHOWN", "| tojson")
    return found


def conversation(*texts: str) -> list[ChatMessage]:
    roles = ("user", "assistant")
    return [ChatMessage(role=roles[i % 2], content=text) for i, text in enumerate(texts)]  # type: ignore[arg-type]


def test_template_variables(tokenizer: Tokenizer) -> None:
    messages = conversation("hello")
    assert chat_text(tokenizer, messages, variables={"mood": "gladly: "}).endswith("gladly: ")
    assert chat_text(tokenizer, messages, generation=False).endswith("<|im_end|>\n")
    for name in ("messages", "tools", "add_generation_prompt", "self"):
        with pytest.raises(APIError, match=name):
            chat_text(tokenizer, messages, variables={name: 1})


@pytest.mark.parametrize("content", ["the thing", "the <|im_end|> thing ", "{{ x }}", ""])
def test_the_last_message_is_continued(tokenizer: Tokenizer, content: str) -> None:
    text = chat_text(tokenizer, conversation("hello", content), continue_final=True)
    assert text == f"<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n{content}"
    ids = tokenizer.encode(text, add_special=False)
    assert tokenizer.decode(ids, skip_special=False) == text
    end = tokenizer.token_id("<|im_end|>")
    assert ids.count(end or -1) == 1  # the one that is written in the message is text
    with pytest.raises(APIError, match="exclude"):
        chat_text(tokenizer, conversation("a", "b"), continue_final=True, generation=True)


@pytest.mark.parametrize("shown", ["| tojson", "", "+ ''", "if m.tool_calls else ''"])
def test_arguments_of_earlier_calls_are_json_in_every_template(
    tokenizer: Tokenizer, shown: str
) -> None:
    """A template may take the arguments as an object, or print them."""
    tokenizer.__dict__.pop("_template", None)
    tokenizer.chat_template = TOOLS_TEMPLATE.replace("SHOWN", shown)
    call = {"id": "c", "function": {"name": "paint", "arguments": '{"name": "\\"x\\"", "n": null}'}}
    message = ChatMessage.model_validate({"role": "assistant", "tool_calls": [call]})
    text = chat_text(tokenizer, [*conversation("hello"), message])
    shown_call = text.split("assistant\n")[1].split("<|im_end|>")[0]
    assert json.loads(shown_call) == {"name": '"x"', "n": None}
    tokenizer.__dict__.pop("_template", None)
    tokenizer.chat_template = TOOLS_TEMPLATE.replace("SHOWN", "| tojson")


def test_a_continued_answer(server: Running, client: openai.OpenAI) -> None:
    whole = chat(client).choices[0].message.content
    half = whole[: len(whole) // 2]
    messages = [*MESSAGES, {"role": "assistant", "content": half}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    prompt = post(server, "/tokenize", **body)["tokens"]
    assert post(server, "/detokenize", tokens=prompt)["prompt"].endswith(half)
    found = post(server, "/v1/chat/completions", **body, max_tokens=4, return_token_ids=True)
    assert found["prompt_token_ids"] == prompt


# --- structured outputs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
    ],
)
def test_schemas(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    found = chat(client, extra_body=fields, max_tokens=80).choices[0].message.content
    jsonschema.validate(json.loads(found), SCHEMA)


@pytest.mark.parametrize("kind", ["structured_outputs", "guided"])
def test_other_structures(server: Running, kind: str) -> None:
    wanted: dict[str, Any] = {
        "regex": "(red|blue)-[0-9]{2}",
        "choice": ['a "quoted" one', "zwei", "drei\n"],
        "grammar": 'root ::= "yes" | "no"',
    }
    for name, value in wanted.items():
        fields = (
            {kind: {name: value}} if kind == "structured_outputs" else {f"guided_{name}": value}
        )
        text = complete(server, temperature=1.0, seed=4, max_tokens=60, **fields)["text"]
        if name == "choice":
            assert text in value
        elif name == "regex":
            assert len(text) in (6, 7)
        else:
            assert text in ("yes", "no")
    lark = complete(server, structured_outputs={"grammar": 'start: "a"~3'})["text"]
    assert lark == "aaa"
    found = complete(server, structured_outputs={"json_object": True}, max_tokens=60)["text"]
    assert isinstance(json.loads(found), dict)


def test_structural_tags(server: Running) -> None:
    tag = {"begin": "<f>", "schema": {"const": 5}, "end": "</f>"}
    wanted = {"type": "structural_tag", "structures": [tag], "triggers": ["<f"]}
    bias = {str(post(server, "/tokenize", prompt="<")["tokens"][-1]): 12.0}
    for given in (wanted, json.dumps(wanted)):
        fields = {"structured_outputs": {"structural_tag": given}, "logit_bias": bias}
        text = complete(server, max_tokens=60, temperature=1.0, seed=1, **fields)["text"]
        assert text.count("<f") == text.count("<f>5</f>") + text.endswith(("<f", "<f>", "<f>5"))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"structured_outputs": {}}, "0 are set"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "2 are set"),
        ({"structured_outputs": {"choice": []}}, "choose"),
        ({"structured_outputs": {"json": "{"}}, "not valid JSON"),
        ({"structured_outputs": {"structural_tag": {"triggers": []}}}, "structural_tag"),
        ({"structured_outputs": {"xgrammar": "a"}}, "xgrammar"),
        ({"guided_json": "3"}, "JSON schema"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "exclude each other"),
        ({"guided_regex": "("}, "regex"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["x"] * 1000}, "bad words"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ],
)
def test_wrong_values(client: openai.OpenAI, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(openai.BadRequestError, match=named):
        chat(client, extra_body=fields)


# --- text and tokens --------------------------------------------------------------------------------


def test_a_stop_string_in_the_output(server: Running) -> None:
    body: dict[str, Any] = {"max_tokens": 48, "ignore_eos": True}
    whole = complete(server, **body)["text"]
    stop = whole[3:5]
    without = complete(server, **body, stop=[stop])
    included = complete(server, **body, stop=[stop], include_stop_str_in_output=True)
    assert without["finish_reason"] == included["finish_reason"] == "stop"
    assert included["text"] == without["text"] + stop
    assert whole.startswith(included["text"])


def test_special_tokens_in_the_output(server: Running) -> None:
    [end] = post(server, "/tokenize", prompt="<|end|>", add_special_tokens=False)["tokens"]
    body: dict[str, Any] = {"logit_bias": {str(end): 1000.0}, "max_tokens": 3}
    assert complete(server, **body)["text"] == ""
    assert complete(server, **body, skip_special_tokens=False)["text"] == "<|end|>" * 3


@pytest.mark.parametrize("method", ["plain", "auto", "ngram", "suffix"])
def test_bad_words(server: Running, method: str) -> None:
    body: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "outstride": {"method": method}}
    free = complete(server, **body)["text"]
    letters = [c for c in sorted(set(free)) if c.isalnum()][:3]
    words = [*letters, free[10:13].strip() or "th"]
    bound = complete(server, **body, bad_words=words)["text"]
    assert bound != free
    assert not any(word in bound for word in words[:3])
    assert (
        bound
        == complete(server, **body | {"outstride": {"method": "plain"}}, bad_words=words)["text"]
    )


def test_truncated_prompts(server: Running) -> None:
    ids = post(server, "/tokenize", prompt="a long story about the thing in the box")["tokens"]
    found = complete(server, ids, truncate_prompt_tokens=5, return_token_ids=True)
    assert found["prompt_token_ids"] == ids[-5:]
    assert found["text"] == complete(server, ids[-5:])["text"]
    long = [65] * 5000
    assert (
        httpx.post(f"{server.url}/v1/completions", json={"prompt": long}, timeout=CAP).status_code
        == 400
    )
    fitted = complete(server, long, truncate_prompt_tokens=-1, return_token_ids=True)
    assert len(fitted["prompt_token_ids"]) == 4096 - 12
    echoed = complete(server, "in the box", truncate_prompt_tokens=3, echo=True, max_tokens=0)
    assert len(echoed["text"]) <= 4


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_token_ids(server: Running, path: str) -> None:
    body: dict[str, Any] = {"max_tokens": 12, "seed": 3, "return_token_ids": True, "n": 2}
    body |= {"messages": MESSAGES} if "chat" in path else {"prompt": "in the"}
    whole = post(server, path, **body)
    prompt = whole.get("prompt_token_ids") or whole["choices"][0]["prompt_token_ids"]
    texts = [c["text"] if "text" in c else c["message"]["content"] for c in whole["choices"]]
    for choice, text in zip(whole["choices"], texts, strict=True):
        assert len(choice["token_ids"]) > 0
        assert post(server, "/detokenize", tokens=choice["token_ids"])["prompt"].startswith(
            text[:4]
        )
    streamed: dict[int, list[int]] = {0: [], 1: []}
    prompts = []
    with httpx.stream(
        "POST", f"{server.url}{path}", json={**body, "stream": True}, timeout=CAP
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                prompts += [chunk["prompt_token_ids"]] if "prompt_token_ids" in chunk else []
                for choice in chunk["choices"]:
                    streamed[choice["index"]] += choice["token_ids"]
    assert prompts == [prompt] * 2
    assert streamed == {c["index"]: c["token_ids"] for c in whole["choices"]}
