"""`outstride fill` and `LLM.fill`: text around holes stays, holes are filled."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from outstride import SamplingParams, registry
from outstride.cli import main
from outstride.cli.context import Context
from outstride.core.contracts import FULL, AttentionPattern, MaskedSpec
from outstride.errors import InvalidPrompt, UnknownMethod
from outstride.llm import LLM, AsyncLLM
from outstride.models.load import Loaded
from outstride.models.toy import Toy
from tests.bench.fake import ALPHABET, FakeTokenizer

SIZE = len(ALPHABET)
CANVAS = MaskedSpec(SIZE, block=None, shifted=False, causal=False)


def masked_model(vision: AttentionPattern = FULL, masking: MaskedSpec | None = CANVAS) -> Loaded:
    model: Any = Toy(vocab_size=SIZE, pages=256, attention_pattern=vision, masking=masking)
    tokenizer: Any = FakeTokenizer()
    return Loaded(model=model, tokenizer=tokenizer, name="toy", context=512, path=Path("toy"))


def masked_llm(vision: AttentionPattern = FULL, masking: MaskedSpec | None = CANVAS) -> LLM:
    return LLM(masked_model(vision, masking))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments, context=Context(load=lambda name, device, weights: masked_llm()))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


TEXT = "the <mask:5> sat on the <mask:3>."


def test_text_around_holes_stays() -> None:
    for vision, masking in ((FULL, CANVAS), (AttentionPattern(4), MaskedSpec(SIZE, 4, True, True))):
        with masked_llm(vision, masking) as llm:
            params = SamplingParams(temperature=0.8, seed=3, n=2, logprobs=1)
            found = llm.fill(TEXT, params, method="threshold:threshold=0.1", trace=True)
            assert len({f.text for f in found}) == 2
            for filled in found:
                first, second = filled.holes
                assert (len(first), len(second)) == (5, 3)
                assert filled.text == f"the {first} sat on the {second}."
                kinds = [row.kind for row in filled.completion.trace or ()]
                assert kinds.count("unmasked") == 8
                assert len(filled.completion.logprobs or ()) == 8, "given text has no probability"


def test_holes_that_make_no_sense() -> None:
    with masked_llm() as llm:
        with pytest.raises(InvalidPrompt, match="no gaps"):
            llm.fill("nothing here")
        with pytest.raises(InvalidPrompt, match="1 to"):
            llm.fill("a <mask:0> b")
    causal: Any = Toy(vocab_size=SIZE, pages=256)
    tokenizer: Any = FakeTokenizer()
    plain = Loaded(model=causal, tokenizer=tokenizer, name="toy", context=512, path=Path("toy"))
    with LLM(plain) as llm, pytest.raises(UnknownMethod, match="cannot do infilling"):
        llm.fill(TEXT)


def test_a_masked_model_has_a_method_of_its_own_by_default() -> None:
    with masked_llm() as llm:
        params = SamplingParams(max_tokens=12, seed=1)
        [result] = llm.generate("hello", params)
        assert result.outputs[0].method == llm.default_method == "steps"
        assert llm.generate("hello", params, method="verify")[0].text == result.text
        with pytest.raises(UnknownMethod, match="such as steps"):
            llm.generate("hello", params, method="plain")
        chunks = list(llm.stream("hello", params, canvas=True))
        assert "".join(chunk.text for chunk in chunks) == result.text
        assert any(chunk.canvas for chunk in chunks), "tokens beyond a gap are seen"
        quiet = list(llm.stream("hello", params))
        assert all(chunk.canvas is None for chunk in quiet)
        assert len(quiet) <= len(chunks)


def test_auto_is_the_default_of_a_model_that_only_fills_in() -> None:
    params = SamplingParams(max_tokens=12, seed=1)
    with masked_llm() as llm:
        [result] = llm.generate("hello", params, method="auto")
        assert result.outputs[0].method == llm.default_method
        assert result.text == llm.generate("hello", params)[0].text
    with masked_llm(AttentionPattern(4), MaskedSpec(SIZE, 4, True, True)) as llm:
        [result] = llm.generate("hello", params, method="auto")
        assert result.outputs[0].method == "auto"
        assert result.text == llm.generate("hello", params, method="plain")[0].text


def test_awaiting_fills_in_and_shows_the_canvas_alike() -> None:
    async def scenario() -> None:
        params = SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=12)
        with masked_llm() as llm:
            filled = llm.fill(TEXT, params)
            chunks = list(llm.stream("hello", params, canvas=True))
            async with AsyncLLM(masked_model()) as other:
                found = await other.fill(TEXT, params)
                assert [f.text for f in found] == [f.text for f in filled]
                assert [f.holes for f in found] == [f.holes for f in filled]
                seen = [chunk async for chunk in other.stream("hello", params, canvas=True)]
                assert [c.canvas for c in seen] == [c.canvas for c in chunks]
                assert any(c.canvas for c in seen)
                with pytest.raises(InvalidPrompt, match="no gaps"):
                    await other.fill("nothing here")

    asyncio.run(scenario())


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "fill", TEXT, "--method", "steps:count=2")
    assert code == 0
    text, cost = out.splitlines()
    assert text.startswith("the ")
    assert " sat on the " in text
    assert "8 tokens" in cost or "tokens" in cost
    code, out, _ = run(capsys, "fill", TEXT, "--json", "--n", "2", "--temperature", "1")
    values = json.loads(out)
    assert code == 0
    assert [len(output["holes"]) for output in values["outputs"]] == [2, 2]
    code, _, err = run(capsys, "fill", "no holes")
    assert code == 1
    assert "<mask:8>" in err


def test_a_method_is_proved_against_what_it_is_exact_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert registry.baseline("verify:count=2,ahead=3,order=margin") == "steps:count=2,order=margin"
    assert registry.baseline("threshold:block=8,cache=dual") == "steps:block=8"
    assert registry.baseline("ngram:length=3") == registry.baseline("self-diffuse") == "plain"
    common = ("--raw", "--limit", "2", "--max-tokens", "16", "--batch", "2", "--alone", "1")
    code, out, _ = run(capsys, "prove", "--method", "verify:count=2", *common)
    assert code == 0
    assert "equal on all" in out
    code, out, _ = run(capsys, "prove", "--method", "threshold:threshold=0.05", *common)
    assert "different on" in out
    assert "token" in out
