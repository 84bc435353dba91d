"""`bad_words`: token sequences that an answer must not contain, under every exact method alike."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outstride import registry
from outstride.core.params import SamplingParams
from outstride.errors import InvalidGrammar, InvalidParams
from tests.conformance.harness import PLAIN, Bench, alone, some_prompts

METHODS = ("ngram", "suffix", "lookahead", "recycle", "mix", "draft:model=draft")


def contains(tokens: list[int], word: tuple[int, ...]) -> bool:
    size = len(word)
    return any(tuple(tokens[i : i + size]) == word for i in range(len(tokens) - size + 1))


def frequent(tokens: list[int], size: int) -> tuple[int, ...]:
    """The sequence of this many tokens that occurs most often."""
    found = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    return max(found, key=found.count)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_bad_word_never_occurs(temperature: float) -> None:
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=5, ignore_eos=True)
    for prompt in some_prompts(3, 3):
        free = alone(prompt, params)
        words = tuple(frequent(free, size) for size in (1, 2, 3))
        assert all(contains(free, word) for word in words)
        bound = alone(prompt, replace(params, bad_words=words))
        assert not any(contains(bound, word) for word in words)
        only_pair = alone(prompt, replace(params, bad_words=words[1:2]))
        first = next(i for i in range(59) if tuple(free[i : i + 2]) == words[1])
        assert only_pair[: first + 1] == free[: first + 1]
        assert only_pair[first + 1] != free[first + 1]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_exact_method_gives_the_same_text(method: str, temperature: float) -> None:
    params = SamplingParams(max_tokens=50, temperature=temperature, seed=9, ignore_eos=True)
    prompts = some_prompts(7, 3)
    words = [frequent(alone(p, params), size) for p in prompts for size in (2, 3)]
    params = replace(params, bad_words=words)
    plain = [alone(prompt, params) for prompt in prompts]
    found = Bench(shake=5).run(prompts, registry.build(method), params)
    assert [sequence.output for sequence in found] == plain


def test_a_word_of_the_prompt_does_not_count() -> None:
    """A word that begins in the prompt is not part of the answer."""
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    [first] = alone([1, 2, 3], params)
    assert alone([1, 2, 3], replace(params, bad_words=[(3, first)])) == [first]
    assert alone([1, 2, 3], replace(params, bad_words=[(first,)])) != [first]


@pytest.mark.parametrize(
    ("words", "named"),
    [([()], "non-empty"), ([("x",)], "token ids"), ([3], "malformed"), ([(True,)], "token ids")],
)
def test_malformed_words(words: Any, named: str) -> None:
    with pytest.raises(InvalidParams, match=named):
        SamplingParams(bad_words=words)


def test_words_that_cannot_be_avoided() -> None:
    bench = Bench()
    with pytest.raises(InvalidParams, match="token id 99"):
        bench.engine.submit([1], SamplingParams(bad_words=[(1, 99)]), PLAIN)
    with pytest.raises(InvalidParams, match="every token"):
        bench.engine.submit([1], SamplingParams(bad_words=[(i,) for i in range(24)]), PLAIN)

    mask = np.zeros(bench.target.vocab_size, dtype=np.bool_)
    mask[3] = True
    grammar: Any = SimpleNamespace(allowed=lambda output: mask)
    params = SamplingParams(bad_words=[(3,)], max_tokens=4)
    sequence = bench.engine.submit([1], params, PLAIN, grammar=grammar)
    bench.finish()
    assert isinstance(sequence.error, InvalidGrammar)
    assert "bad_words" in str(sequence.error)


def test_masked_methods_take_single_tokens_only() -> None:
    bench = Bench()
    method = registry.build("steps")
    with pytest.raises(InvalidParams, match="single tokens"):
        bench.engine.submit([1], SamplingParams(bad_words=[(1, 2)]), method)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    free = Bench().run([[1, 2]], method, params)[0].output
    word = frequent(free, 1)
    bound = Bench().run([[1, 2]], method, replace(params, bad_words=[word]))[0].output
    assert not contains(bound, word)
