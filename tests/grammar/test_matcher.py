"""Grammar matchers against fresh llguidance matchers, random walks and jsonschema."""

from __future__ import annotations

import json
import random
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from outstride.core.structured_output import OutputFormat
from outstride.errors import InvalidGrammar
from outstride.grammar.matcher import GrammarCompiler, GrammarMatcher
from outstride.models.tokenizer import Tokenizer
from tests.serve import tiny

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ENDLESS = {
    "type": "object",
    "properties": {
        "list": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
        "text": {"type": "string"},
        "more": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["list", "text", "more"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(tiny.make(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


def shape(schema: object) -> OutputFormat:
    return OutputFormat("json_schema", json.dumps(schema))


def walk(matcher: GrammarMatcher, ends: frozenset[int], seed: int, max_tokens: int) -> list[int]:
    """A random walk through the allowed tokens."""
    numbers, output = random.Random(seed), list[int]()
    while len(output) < max_tokens:
        mask = matcher.allowed(output)
        assert mask is not None
        choices = np.flatnonzero(mask)
        assert len(choices)
        output.append(int(numbers.choice(choices)))
        if output[-1] in ends:
            break
    return output


def test_random_answers_validate(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    ended = 0
    for seed in range(30):
        output = walk(compiler.compile(shape(PERSON)), tokenizer.eos_ids, seed, 400)
        if output[-1] in tokenizer.eos_ids:
            ended += 1
            jsonschema.validate(json.loads(tokenizer.decode(output)), PERSON)
    assert ended == 30


@pytest.mark.parametrize("schema", [PERSON, ENDLESS])
@pytest.mark.parametrize("max_tokens", [40, 70, 200])
def test_an_answer_ends_within_its_bound(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: dict[str, object], max_tokens: int
) -> None:
    for seed in range(12):
        output = walk(
            compiler.compile(shape(schema), max_tokens), tokenizer.eos_ids, seed, max_tokens
        )
        assert output[-1] in tokenizer.eos_ids, tokenizer.decode(output)
        jsonschema.validate(json.loads(tokenizer.decode(output)), schema)


def test_a_distant_bound_changes_nothing(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    for seed in range(5):
        free = walk(compiler.compile(shape(PERSON)), tokenizer.eos_ids, seed, 400)
        bound = walk(compiler.compile(shape(PERSON), 4000), tokenizer.eos_ids, seed, 400)
        assert free == bound


def test_the_answer_depends_on_the_path_alone(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """In any order of queries, with paths that do not fit the format, and after eviction."""
    one = walk(compiler.compile(shape(PERSON)), tokenizer.eos_ids, 1, 400)
    two = walk(compiler.compile(shape(PERSON)), tokenizer.eos_ids, 2, 400)
    paths = [path[:n] for path in (one, two) for n in range(len(path))]
    wrong = [[*path, 7] for path in paths]
    paths += wrong
    expected = [compiler.compile(shape(PERSON)).allowed(path) for path in paths]
    matcher, numbers = compiler.compile(shape(PERSON)), random.Random(0)
    for place in [numbers.randrange(len(paths)) for _ in range(800)]:
        found, wanted = matcher.allowed(paths[place]), expected[place]
        assert (found is None) == (wanted is None)
        if found is not None and wanted is not None:
            assert np.array_equal(found, wanted)


def test_masks_are_those_of_the_library(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(shape(PERSON))
    output = walk(matcher, tokenizer.eos_ids, 3, 400)
    reference: LLMatcher = matcher.root.deep_copy()
    for n, token in enumerate(output[:-1]):
        bits = np.unpackbits(
            np.frombuffer(reference.compute_bitmask(), np.uint8), bitorder="little"
        )
        mask = matcher.allowed(output[:n])
        assert mask is not None
        assert np.array_equal(mask, bits[: len(mask)].astype(bool))
        assert reference.consume_token(token)


def test_jump_forward_is_the_only_text(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(OutputFormat("regex", "the (cat|dog) sleeps"))
    start = tokenizer.decode(matcher.jump_forward([]))
    assert "the ".startswith(start)
    assert start
    cat = tokenizer.encode("the c", add_special=False)
    assert tokenizer.decode(matcher.jump_forward(cat)).startswith("at sleep")
    assert matcher.jump_forward(tokenizer.encode("the ", add_special=False)) == ()
    assert matcher.jump_forward(tokenizer.encode("a", add_special=False)) == ()


def test_after_the_end_only_end_tokens_are_allowed(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    matcher = compiler.compile(OutputFormat("regex", "yes"))
    output = tokenizer.encode("yes", add_special=False)
    mask = matcher.allowed(output)
    assert mask is not None
    assert set(np.flatnonzero(mask)) == tokenizer.eos_ids
    again = matcher.allowed([*output, *tokenizer.eos_ids])
    assert again is not None
    assert set(np.flatnonzero(again)) == tokenizer.eos_ids


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (shape({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (shape({"not": {"type": "string"}}), "not"),
        (shape({"type": "strin"}), "strin"),
        (OutputFormat("json_schema", "{"), "cannot be read"),
        (OutputFormat("regex", "(a|b"), "unclosed"),
        (OutputFormat("regex", "(?=a)b"), "look-around"),
        (OutputFormat("ebnf", "root ::= nowhere"), "nowhere"),
        (OutputFormat("lark", 'start: "yes" | foo'), "foo"),
        (OutputFormat("xml", "<a/>"), "json_schema"),
    ],
)
def test_unsupported_features_are_named(
    compiler: GrammarCompiler, wrong: OutputFormat, named: str
) -> None:
    with pytest.raises(InvalidGrammar, match=named):
        compiler.check(wrong)


@pytest.mark.parametrize(
    ("right", "text"),
    [
        (OutputFormat("ebnf", 'root ::= ("ab" | "c")+ "."'), "abc."),
        (OutputFormat("lark", 'start: "x" "y"+'), "xyy"),
        (OutputFormat("regex", "[0-9]{3}-[a-c]"), "123-b"),
        (OutputFormat("json_object"), '{"a":[1,null]}'),
    ],
)
def test_every_kind_allows_matching_text(
    compiler: GrammarCompiler, tokenizer: Tokenizer, right: OutputFormat, text: str
) -> None:
    matcher, output = compiler.compile(right), tokenizer.encode(text, add_special=False)
    for n, token in enumerate(output):
        assert matcher.allows(output[:n], token), (text, n)
    assert all(matcher.allows(output, end) for end in tokenizer.eos_ids)
    assert not matcher.allows([], tokenizer.encode("!", add_special=False)[0])


def test_a_model_without_an_end_token_is_rejected(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(tiny.make(tmp_path))
    tokenizer.eos_ids = frozenset()
    with pytest.raises(InvalidGrammar, match="no end-of-text token"):
        GrammarCompiler(tokenizer)
