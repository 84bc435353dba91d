"""The Python API on the toy model: sync, streaming, async, lists with a bad request in them."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

import outstride
from outstride import LLM, AsyncLLM, OutputFormat, SamplingParams
from outstride.errors import (
    InvalidGrammar,
    InvalidPrompt,
    ModelNotFound,
    OutstrideError,
    RequestError,
    UnknownMethod,
    UnsupportedModel,
    VocabularyMismatch,
)
from outstride.llm import Prompt
from outstride.models.load import Loaded
from outstride.models.toy import Toy
from tests.bench.fake import ALPHABET, FakeTokenizer, make_llm
from tests.models.drive import random_decoder, tiny
from tests.models.test_adapters import adapter_tensors, write_adapter

PARAMS = SamplingParams(max_tokens=30, ignore_eos=True)


class Foreign:
    """A tokenizer of another family."""

    vocab_size = 7


def loaded(name: str = "toy", tokenizer: Any = None, **toy: Any) -> Loaded:
    model: Any = Toy(vocab_size=len(ALPHABET), pages=256, habit=6.0, **toy)
    its: Any = tokenizer or FakeTokenizer()
    return Loaded(model=model, tokenizer=its, name=name, context=512, path=Path(name))


@pytest.fixture
def llm() -> LLM:
    return make_llm()


@pytest.fixture(autouse=True)
def _draft_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, **_: Any) -> Loaded:
        return loaded(name, Foreign() if name == "foreign" else None, accent=1)

    monkeypatch.setattr("outstride.llm.attachments.load", load)


def test_one_prompt_gives_one_result(llm: LLM) -> None:
    [result] = llm.generate("hello", PARAMS)
    assert result.text == llm.tokenizer.decode(result.token_ids)
    assert len(result.token_ids) == 30
    assert result.finish_reason == "length"
    assert result.stats.passes == result.stats.emitted == 30
    assert result.stats.seconds > 0
    assert result.logprobs is None
    assert result.trace is None
    json.dumps(result.to_dict())


def test_random_seeds_survive_javascript(llm: LLM) -> None:
    """A random seed is below 2**53: JSON clients read it without rounding."""
    params = SamplingParams(max_tokens=1, temperature=1.0)
    seeds = {llm.generate("hello", params)[0].seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(int(float(seed)) == seed < 2**53 for seed in seeds)
    assert max(seeds) > 2**48


def test_methods_and_params_may_differ_per_prompt(llm: LLM) -> None:
    prompts: list[Prompt] = ["one two one", "abc abc abc", [3, 4, 5]]
    methods = ["plain", "ngram", "draft:model=small,length=3,width=2"]
    params = [PARAMS, SamplingParams(max_tokens=9), SamplingParams(temperature=0.7, seed=4)]
    mixed = llm.generate(prompts, params, method=methods, trace=True)
    for prompt, its, result in zip(prompts, params, mixed, strict=True):
        [plain] = llm.generate(prompt, its)
        assert result.token_ids == plain.token_ids
        assert result.trace is not None
        assert [p.token for p in result.trace] == result.token_ids
    assert mixed[1].outputs[0].method == "ngram"


def test_chat_applies_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    [by_text] = llm.chat("hi", PARAMS)
    [by_messages] = llm.chat(messages, PARAMS)
    [by_hand] = llm.generate("<user>hi\n<assistant>", PARAMS)
    assert by_text.token_ids == by_messages.token_ids == by_hand.token_ids
    two = llm.chat([messages, messages], PARAMS)
    assert [r.token_ids for r in two] == [by_hand.token_ids] * 2


NUMBER = {"type": "integer", "minimum": 100, "maximum": 999}
SHAPES: dict[str, tuple[Any, str]] = {
    "schema": (NUMBER, "[1-9][0-9]{2}"),
    "regex": (OutputFormat.regex("[a-c]{4}(dog|cat)"), "[a-c]{4}(dog|cat)"),
    "ebnf": (OutputFormat.ebnf('root ::= "a" ("b" | "c") [0-9]+ "."'), r"a[bc][0-9]+\."),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_structured_output_is_the_same_under_every_method(llm: LLM, kind: str) -> None:
    shape, expected = SHAPES[kind]
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=20, temperature=temperature, seed=3)
        [plain] = llm.chat("hi", params, shape=shape)
        assert re.fullmatch(expected, plain.text)
        assert plain.finish_reason == "stop"
        for method in ("auto", "ngram", "mix", "draft:model=small,length=3"):
            [result] = llm.chat("hi", params, shape=shape, method=method)
            assert result.token_ids == plain.token_ids
        messages = [{"role": "user", "content": "hi"}]
        chunks = list(llm.stream(messages, params, shape=shape, method="auto"))
        assert "".join(chunk.text for chunk in chunks) == plain.text


def test_shapes_may_differ_per_prompt_and_a_wrong_one_fails_alone(llm: LLM) -> None:
    shapes = [NUMBER, None, OutputFormat.regex("[a")]
    number, free, wrong = llm.generate(["a", "b", "c"], PARAMS, shape=shapes)
    assert 100 <= int(number.text) <= 999
    assert free.token_ids == llm.generate("b", PARAMS)[0].token_ids
    assert isinstance(wrong.error, InvalidGrammar)


def test_streaming_gives_the_same_text(llm: LLM) -> None:
    [whole] = llm.generate("abc abc abc abc", PARAMS, method="ngram")
    chunks = list(llm.stream("abc abc abc abc", PARAMS, method="ngram", trace=True))
    assert "".join(c.text for c in chunks) == whole.text
    assert [t for c in chunks for t in c.token_ids] == whole.token_ids
    assert len(chunks) == whole.stats.passes
    assert chunks[-1].finish_reason == "length"
    assert chunks[-1].completion is not None
    assert chunks[-1].completion.stats.passes == whole.stats.passes
    assert [p.token for c in chunks for p in c.trace or []] == whole.token_ids


def test_leaving_a_stream_cancels_it() -> None:
    llm = make_llm(pause=0.005)
    for _ in llm.stream("hello", SamplingParams(max_tokens=400, ignore_eos=True)):
        break
    [result] = llm.generate("after", PARAMS)
    assert len(result.token_ids) == 30
    assert llm.engine.running == ()


def test_n_samples(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, n=3, ignore_eos=True, logprobs=2)
    [result] = llm.generate("abc", params)
    assert [o.index for o in result.outputs] == [0, 1, 2]
    assert len({o.text for o in result.outputs}) == 3
    [again] = llm.generate(
        "abc",
        SamplingParams(max_tokens=12, temperature=1.0, n=3, ignore_eos=True, seed=result.seed),
    )
    assert [o.text for o in again.outputs] == [o.text for o in result.outputs]
    assert result.logprobs is not None
    assert [row.token_id for row in result.logprobs] == result.token_ids
    assert all(len(row.top) == 2 for row in result.logprobs)


def test_prompt_logprobs(llm: LLM) -> None:
    [result] = llm.generate("hello", SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert result.prompt_logprobs is not None
    first, *rest = result.prompt_logprobs
    assert first is None
    assert [row.token_id for row in rest if row] == result.prompt_token_ids[1:]


def test_one_bad_request_fails_alone(llm: LLM) -> None:
    prompts: list[Prompt] = ["good", "", "also good", [10**6]]
    results = llm.generate(prompts, PARAMS, method=["ngram", "plain", "plain", "plain"])
    assert [r.error is None for r in results] == [True, False, True, False]
    assert isinstance(results[1].error, InvalidPrompt)
    assert results[1].finish_reason == "error"
    [alone] = llm.generate("good", PARAMS)
    assert results[0].token_ids == alone.token_ids
    with pytest.raises(InvalidPrompt):
        _ = results[3].text


@pytest.mark.parametrize(
    ("prompt", "method", "error", "words"),
    [
        ("", "plain", InvalidPrompt, "empty"),
        ("x" * 600, "plain", InvalidPrompt, "600 tokens"),
        ([1.5], "plain", InvalidPrompt, "token ids"),
        ("x", "ngarm", UnknownMethod, "did you mean ngram"),
        ("x", "ngram:size=3", UnknownMethod, "length, longest, shortest"),
        ("x", "ngram:length=many", UnknownMethod, "type int"),
        ("x", "ngram:length=0", UnknownMethod, "length >= 1"),
        ("x", "draft", UnknownMethod, "draft:model="),
        ("x", "draft:model=foreign", VocabularyMismatch, "7 and"),
    ],
)
def test_bad_requests_say_what_to_do(
    llm: LLM, prompt: Any, method: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        llm.generate(prompt, PARAMS, method=method)
    with pytest.raises(error, match=words):
        list(llm.stream(prompt, PARAMS, method=method))


def test_lists_must_have_one_value_per_prompt(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 values of method for 1 prompts"):
        llm.generate(["a"], PARAMS, method=["plain", "plain"])


def test_threads_share_one_engine(llm: LLM) -> None:
    texts: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        texts[i] = llm.generate(f"thread {i % 3}", PARAMS, method="ngram")[0].token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(9):
        assert texts[i] == llm.generate(f"thread {i % 3}", PARAMS)[0].token_ids


def test_a_failed_step_ends_all_requests_and_the_engine_goes_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Any) -> Any:
        raise RuntimeError("the device failed")

    with monkeypatch.context() as patch:
        patch.setattr(llm.model, "forward", broken)
        results = llm.generate(["a", "b"], PARAMS)
        assert all("device" in str(r.error) for r in results)
    [after] = llm.generate("a", PARAMS)
    assert len(after.token_ids) == 30
    llm.engine.check_integrity()


def test_closing(llm: LLM) -> None:
    with llm:
        llm.generate("a", PARAMS)
    with pytest.raises(OutstrideError, match="closed"):
        llm.generate("a", PARAMS)
    make_llm().close()


def test_async_api() -> None:
    async def scenario() -> None:
        sync = make_llm()
        expected = [r.token_ids for r in sync.generate(["abc abc", "xyz"], PARAMS)]
        async with AsyncLLM(loaded()) as llm:
            results = await llm.generate(["abc abc", "xyz"], PARAMS, method=["ngram", "plain"])
            assert [r.token_ids for r in results] == expected
            tokens: list[int] = []
            async for chunk in llm.stream("abc abc", PARAMS, method="ngram"):
                tokens += chunk.token_ids
            assert tokens == expected[0]
            [number] = await llm.generate("hi", PARAMS, shape=NUMBER, method="auto")
            assert number.token_ids == sync.generate("hi", PARAMS, shape=NUMBER)[0].token_ids
            assert 100 <= int(number.text) <= 999
            [chat] = await llm.chat("hi", PARAMS)
            assert chat.token_ids == sync.chat("hi", PARAMS)[0].token_ids
            with pytest.raises(InvalidPrompt):
                await llm.generate("", PARAMS)
            mixed = await llm.generate(["", "xyz"], PARAMS)
            assert mixed[0].error is not None
            assert mixed[1].token_ids == expected[1]

    asyncio.run(scenario())


def test_cancelling_a_task_frees_its_pages() -> None:
    async def scenario() -> None:
        async with AsyncLLM(make_slow()) as llm:
            long = SamplingParams(max_tokens=400, ignore_eos=True)
            task = asyncio.create_task(llm.generate("hello", long))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await llm.generate("short", SamplingParams(max_tokens=2))
            assert llm.engine.running == ()

    asyncio.run(scenario())


def make_slow() -> Loaded:
    slow = make_llm(pause=0.005)
    return Loaded(slow.model, slow.tokenizer, "toy", 512, Path("toy"))


def test_public_names_are_there() -> None:
    for name in outstride.__all__:
        assert getattr(outstride, name) is not None
    with pytest.raises(AttributeError):
        _ = outstride.nothing


def test_an_adapter_brings_masked_methods(tmp_path: Path) -> None:
    """For all masked methods, or for self-diffuse alone, whose text is that of plain decoding."""

    def fresh() -> Loaded:
        model: Any = random_decoder(tiny(vocab_size=len(ALPHABET)))
        its: Any = FakeTokenizer()
        return Loaded(model=model, tokenizer=its, name="tiny", context=512, path=tmp_path)

    config = tiny(vocab_size=len(ALPHABET))
    folder, params = write_adapter(tmp_path, config, adapter_tensors(config)), PARAMS
    [plain] = LLM(fresh()).generate("hello", params)
    whole = LLM(fresh(), adapter=folder)
    methods = ["plain", "self-diffuse", "steps", "threshold:threshold=0.02", "factor:factor=3"]
    found = whole.generate(["hello"] * 5, params, method=methods)
    assert [result.token_ids for result in found[:3]] == [plain.token_ids] * 3
    assert all(len(result.token_ids) == 30 for result in found)
    assert found[4].stats.passes < 30
    with pytest.raises(UnsupportedModel, match="already"):
        whole.adapt(folder)
    one = LLM(fresh())
    [drafted] = one.generate("hello", params, method=f"self-diffuse:from={folder},length=3")
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.nodes > 4 * drafted.stats.passes
    with pytest.raises(UnknownMethod, match="adapter"):
        LLM(fresh()).generate("hello", params, method="self-diffuse")
    with pytest.raises(UnknownMethod, match="adapter"):
        LLM(fresh()).generate("hello", params, method="steps")
    with pytest.raises(ModelNotFound, match="diffusion-adapter"):
        LLM(fresh(), adapter="shipped")


def test_a_method_can_be_prepared_before_its_first_request(llm: LLM) -> None:
    """Also while other requests decode: it is measured between two passes, and no text changes."""
    alone = llm.generate(["hello there"], PARAMS, method="plain")[0].text
    stream = llm.stream("hello there", PARAMS, method="plain")
    said = [next(stream).text]
    llm.prepare("auto:from=none")
    assert llm.engine.cost is not None
    said += [chunk.text for chunk in stream]
    assert "".join(said) == alone
    with pytest.raises(UnknownMethod):
        llm.prepare("no such method")
    llm.close()
    with pytest.raises(OutstrideError, match="closed"):
        llm.prepare("auto:from=none")
