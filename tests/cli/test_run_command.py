"""`outstride run`: the answer, its cost in the last line, and every option."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outstride.core.params import SamplingParams
from outstride.errors import InvalidPrompt
from outstride.llm import LLM
from outstride.results import Chunk
from tests.bench.fake import make_llm
from tests.cli.shell import Shell

COST = re.compile(
    r"(\d+) tokens, (\d+) passes, (\d+\.\d\d) tokens per pass, \d+\.\d\d s, \d+\.\d tok/s"
)


def text_of(prompt: str, params: SamplingParams, *, chat: bool = True) -> str:
    with make_llm() as llm:
        [result] = llm.chat(prompt, params) if chat else llm.generate(prompt, params)
        return result.text


def test_answer_and_cost(shell: Shell) -> None:
    ran = shell("run", "hello", "--method", "ngram", "--max-tokens", "40")
    assert ran.code == 0
    assert ran.err == ""
    found = COST.fullmatch(ran.last)
    assert found
    tokens, passes = int(found[1]), int(found[2])
    assert tokens == 40
    assert passes < tokens
    assert float(found[3]) == pytest.approx(tokens / passes, abs=0.01)
    text = text_of("hello", SamplingParams(max_tokens=40))
    assert ran.out == text + ("" if text.endswith("\n") else "\n") + ran.last + "\n"


def test_prompt_from_standard_input(shell: Shell) -> None:
    ran = shell("run", "-", "--json", "--max-tokens", "20", stdin="hello")
    text = json.loads(ran.out)["outputs"][0]["text"]
    assert text == text_of("hello", SamplingParams(max_tokens=20))


def test_json(shell: Shell) -> None:
    ran = shell("run", "hello", "--json", "--trace", "--logprobs", "2", "--max-tokens", "9")
    values = json.loads(ran.out)
    assert len(ran.out.splitlines()) == 1
    assert values["model"] == "smollm2"
    assert values["fingerprint"].startswith("toy")
    [output] = values["outputs"]
    assert len(output["token_ids"]) == output["stats"]["emitted"] == 9
    assert output["trace"][0].keys() == {"token", "step", "source", "kind"}
    assert len(output["logprobs"][0]["top"]) == 2
    assert values["prompt_token_ids"]


NUMBER = '{"type": "integer", "minimum": 100, "maximum": 999}'


def test_answers_of_a_shape(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(NUMBER)
    for method in ("plain", "auto"):
        for schema in (NUMBER, str(file)):
            ran = shell("run", "hello", "--schema", schema, "--method", method)
            assert 100 <= int(ran.out.splitlines()[0]) <= 999
    ran = shell("run", "hello", "--json", "--regex", "[a-c]{5}", "--temperature", "1")
    assert re.fullmatch("[a-c]{5}", json.loads(ran.out)["outputs"][0]["text"])


def test_shapes_that_cannot_be(shell: Shell) -> None:
    for options, words in (
        (("--schema", "nowhere.json"), "nowhere.json"),
        (("--schema", "{"), "json_schema"),
        (("--regex", "[a"), "regex"),
    ):
        ran = shell("run", "hello", *options)
        assert ran.code == 1
        assert words in ran.err
    assert shell("run", "hello", "--regex", "a", "--schema", NUMBER).code == 2


OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "--temperature": ("0.9", {"temperature": 0.9}),
    "--top-k": ("3", {"top_k": 3}),
    "--top-p": ("0.7", {"top_p": 0.7}),
    "--min-p": ("0.2", {"min_p": 0.2}),
    "--repetition-penalty": ("1.5", {"repetition_penalty": 1.5}),
    "--presence-penalty": ("0.8", {"presence_penalty": 0.8}),
    "--frequency-penalty": ("0.9", {"frequency_penalty": 0.9}),
    "--min-tokens": ("20", {"min_tokens": 20}),
    "--stop": ("a", {"stop": ("a",)}),
    "--stop-token-id": ("5", {"stop_token_ids": (5,)}),
    "--logit-bias": ("7=2.5", {"logit_bias": {7: 2.5}}),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_each_sampling_option_reaches_the_engine(shell: Shell, option: str) -> None:
    text, values = OPTIONS[option]
    given: dict[str, Any] = {"temperature": 0.6, "seed": 11, "max_tokens": 30, **values}
    arguments = ["--temperature", "0.6", "--seed", "11", "--max-tokens", "30", option, text]
    ran = shell("run", "tell me", *arguments, "--json")
    assert ran.code == 0
    assert json.loads(ran.out)["outputs"][0]["text"] == text_of(
        "tell me", SamplingParams.from_dict(given)
    )


def test_flags(shell: Shell) -> None:
    ran = shell("run", "abc", "--ignore-eos", "--max-tokens", "100", "--json")
    assert len(json.loads(ran.out)["outputs"][0]["token_ids"]) == 100
    ran = shell("run", "abc", "--stop", "a", "--stop", "e", "--json")
    assert not set("ae") & set(json.loads(ran.out)["outputs"][0]["text"])


def test_raw_and_system(shell: Shell) -> None:
    def prompt_length(*arguments: str) -> int:
        ran = shell("run", "hello", "--json", "--max-tokens", "1", *arguments)
        return len(json.loads(ran.out)["prompt_token_ids"])

    assert prompt_length("--raw") == len("hello")
    assert prompt_length() == len("<user>hello\n<assistant>")
    assert prompt_length("--system", "hi") == len("<system>hi\n<user>hello\n<assistant>")
    ran = shell("run", "hello", "--raw", "--system", "hi")
    assert ran.code == 2
    assert "--raw" in ran.err


def test_several_answers_come_one_after_the_other(shell: Shell) -> None:
    arguments = ("--n", "3", "--temperature", "1", "--seed", "2", "--max-tokens", "20")
    ran = shell("run", "hello", *arguments)
    outputs = json.loads(shell("run", "hello", *arguments, "--json").out)["outputs"]
    assert len({output["text"] for output in outputs}) == 3
    rest = ran.out
    for i, output in enumerate(outputs, start=1):
        _, _, rest = rest.partition(f"[{i} of 3]\n")
        assert rest.startswith(output["text"])
    total = sum(output["stats"]["emitted"] for output in outputs)
    assert ran.last.startswith(f"{total} tokens, ")


def test_trace_without_colours_marks_tokens(shell: Shell) -> None:
    ran = shell("run", "abcabcabc", "--method", "ngram", "--trace", "--max-tokens", "40")
    assert ran.code == 0
    assert COST.fullmatch(ran.last)
    assert re.search(r"\[drafted\] \d+: .*\n\(bonus\) \d+: .*\nplain \d+: ", ran.out)
    assert re.search(r"pass +tokens +drafted +from +text", ran.out)
    assert re.search(r"\n +\d+ +\d+ +[1-9] +ngram ", ran.out)


def test_logprobs_as_a_table(shell: Shell) -> None:
    ran = shell("run", "abc", "--logprobs", "2", "--max-tokens", "5")
    assert re.search(r"token +logprob +most probable", ran.out)
    assert COST.fullmatch(ran.last)


def test_unknown_method_is_answered_with_near_ones_and_no_model(shell: Shell) -> None:
    ran = shell("run", "x", "--method", "ngrm", pages=0)
    assert ran.code == 1
    assert ran.err == "error: unknown method 'ngrm'; did you mean ngram or trigram?\n"
    assert ran.out == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["", "--json"], "the prompt is empty"),
        (["", "--raw"], "the prompt is empty"),
        (["x" * 600], "context"),
        (["x", "--temperature", "-1"], "temperature"),
        (["x", "--top-p", "0"], "top_p"),
        (["x", "--max-tokens", "0"], "max_tokens"),
        (["x", "--method", "ngram:length=x"], "length"),
        (["x", "--method", "draft"], "needs model"),
    ],
)
def test_bad_requests_get_one_line(shell: Shell, arguments: list[str], said: str) -> None:
    ran = shell("run", *arguments)
    assert ran.code == 1
    assert ran.out == ""
    assert ran.err.startswith("error: ")
    assert said in ran.err
    assert len(ran.err.splitlines()) == 1


def test_an_interrupted_answer_ends_its_line(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def stream(*_: object, **__: object) -> Iterator[Chunk]:
        yield Chunk("half an", [1])
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", stream)
    ran = shell("run", "x")
    assert (ran.code, ran.out, ran.err) == (130, "half an\n", "")


def test_text_of_a_model_does_not_steer_the_terminal() -> None:
    from outstride.cli import screen

    assert screen.clean("a\x1b[2Jb\r\n\tc\x9b") == "a[2Jb\n\tc"
    assert screen.token_text("a\n\x1b") == "a\\n\\x1b"
    assert screen.explain(InvalidPrompt("x")) == "x"


@pytest.mark.model
def test_the_default_model_answers(capsys: pytest.CaptureFixture[str]) -> None:
    from outstride.cli import main

    assert main(["run", "What is the capital of France?", "--max-tokens", "8"]) == 0
    out = capsys.readouterr().out
    assert "Paris" in out
    assert COST.fullmatch(out.splitlines()[-1])


@pytest.mark.parametrize(
    "command", ["run hello", "fill a<mask:2>", "bench quality --methods plain"]
)
def test_an_adapter_that_is_not_there(shell: Shell, command: str, tmp_path: Path) -> None:
    """The folder is looked for before anything is asked."""
    more = ["--gsm8k", str(tmp_path / "none")] if command.startswith("bench") else []
    (tmp_path / "none").write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    ran = shell(*command.split(), *more, "--adapter", str(tmp_path))
    assert ran.code != 0
    assert "is not a draft head" in ran.err
