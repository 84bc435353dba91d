"""Guides against fresh matchers, random walks and jsonschema."""

from __future__ import annotations

import json
import random
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from outstride.core.shape import Shape
from outstride.errors import InvalidGrammar
from outstride.grammar.guide import Guide, Guides
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
def guides(tokenizer: Tokenizer) -> Guides:
    return Guides(tokenizer)


def shape(schema: object) -> Shape:
    return Shape("json_schema", json.dumps(schema))


def walk(guide: Guide, ends: frozenset[int], seed: int, most: int) -> list[int]:
    """Tokens as a model without a thought would choose them."""
    numbers, output = random.Random(seed), list[int]()
    while len(output) < most:
        mask = guide.allowed(output)
        assert mask is not None
        choices = np.flatnonzero(mask)
        assert len(choices)
        output.append(int(numbers.choice(choices)))
        if output[-1] in ends:
            break
    return output


def test_random_answers_validate(guides: Guides, tokenizer: Tokenizer) -> None:
    ended = 0
    for seed in range(30):
        output = walk(guides.compile(shape(PERSON)), tokenizer.eos_ids, seed, 400)
        if output[-1] in tokenizer.eos_ids:
            ended += 1
            jsonschema.validate(json.loads(tokenizer.decode(output)), PERSON)
    assert ended == 30


@pytest.mark.parametrize("schema", [PERSON, ENDLESS])
@pytest.mark.parametrize("most", [40, 70, 200])
def test_an_answer_ends_within_its_bound(
    guides: Guides, tokenizer: Tokenizer, schema: dict[str, object], most: int
) -> None:
    for seed in range(12):
        output = walk(guides.compile(shape(schema), most), tokenizer.eos_ids, seed, most)
        assert output[-1] in tokenizer.eos_ids, tokenizer.decode(output)
        jsonschema.validate(json.loads(tokenizer.decode(output)), schema)


def test_a_bound_far_away_changes_nothing(guides: Guides, tokenizer: Tokenizer) -> None:
    for seed in range(5):
        free = walk(guides.compile(shape(PERSON)), tokenizer.eos_ids, seed, 400)
        bound = walk(guides.compile(shape(PERSON), 4000), tokenizer.eos_ids, seed, 400)
        assert free == bound


def test_the_answer_depends_on_the_path_alone(guides: Guides, tokenizer: Tokenizer) -> None:
    """Asked in any order, about paths that break the shape too, and after being forgotten."""
    one = walk(guides.compile(shape(PERSON)), tokenizer.eos_ids, 1, 400)
    two = walk(guides.compile(shape(PERSON)), tokenizer.eos_ids, 2, 400)
    paths = [path[:n] for path in (one, two) for n in range(len(path))]
    wrong = [[*path, 7] for path in paths]
    paths += wrong
    expected = [guides.compile(shape(PERSON)).allowed(path) for path in paths]
    guide, numbers = guides.compile(shape(PERSON)), random.Random(0)
    for place in [numbers.randrange(len(paths)) for _ in range(800)]:
        found, wanted = guide.allowed(paths[place]), expected[place]
        assert (found is None) == (wanted is None)
        if found is not None and wanted is not None:
            assert np.array_equal(found, wanted)


def test_masks_are_those_of_the_library(guides: Guides, tokenizer: Tokenizer) -> None:
    guide = guides.compile(shape(PERSON))
    output = walk(guide, tokenizer.eos_ids, 3, 400)
    matcher: LLMatcher = guide.root.deep_copy()
    for n, token in enumerate(output[:-1]):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        mask = guide.allowed(output[:n])
        assert mask is not None
        assert np.array_equal(mask, bits[: len(mask)].astype(bool))
        assert matcher.consume_token(token)


def test_what_is_forced_is_the_only_text(guides: Guides, tokenizer: Tokenizer) -> None:
    guide = guides.compile(Shape("regex", "the (cat|dog) sleeps"))
    start = tokenizer.decode(guide.forced([]))
    assert "the ".startswith(start)
    assert start
    cat = tokenizer.encode("the c", add_special=False)
    assert tokenizer.decode(guide.forced(cat)).startswith("at sleep")
    assert guide.forced(tokenizer.encode("the ", add_special=False)) == ()
    assert guide.forced(tokenizer.encode("a", add_special=False)) == ()


def test_after_the_end_there_is_only_the_end(guides: Guides, tokenizer: Tokenizer) -> None:
    guide = guides.compile(Shape("regex", "yes"))
    output = tokenizer.encode("yes", add_special=False)
    mask = guide.allowed(output)
    assert mask is not None
    assert set(np.flatnonzero(mask)) == tokenizer.eos_ids
    again = guide.allowed([*output, *tokenizer.eos_ids])
    assert again is not None
    assert set(np.flatnonzero(again)) == tokenizer.eos_ids


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (shape({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (shape({"not": {"type": "string"}}), "not"),
        (shape({"type": "strin"}), "strin"),
        (Shape("json_schema", "{"), "cannot be read"),
        (Shape("regex", "(a|b"), "unclosed"),
        (Shape("regex", "(?=a)b"), "look-around"),
        (Shape("ebnf", "root ::= nowhere"), "nowhere"),
        (Shape("lark", 'start: "yes" | foo'), "foo"),
        (Shape("xml", "<a/>"), "json_schema"),
    ],
)
def test_what_is_not_supported_is_named(guides: Guides, wrong: Shape, named: str) -> None:
    with pytest.raises(InvalidGrammar, match=named):
        guides.check(wrong)


@pytest.mark.parametrize(
    ("right", "said"),
    [
        (Shape("ebnf", 'root ::= ("ab" | "c")+ "."'), "abc."),
        (Shape("lark", 'start: "x" "y"+'), "xyy"),
        (Shape("regex", "[0-9]{3}-[a-c]"), "123-b"),
        (Shape("json_object"), '{"a":[1,null]}'),
    ],
)
def test_every_kind_admits_what_it_should(
    guides: Guides, tokenizer: Tokenizer, right: Shape, said: str
) -> None:
    guide, output = guides.compile(right), tokenizer.encode(said, add_special=False)
    for n, token in enumerate(output):
        assert guide.allows(output[:n], token), (said, n)
    assert all(guide.allows(output, end) for end in tokenizer.eos_ids)
    assert not guide.allows([], tokenizer.encode("!", add_special=False)[0])


def test_a_model_without_an_end_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(tiny.make(tmp_path))
    tokenizer.eos_ids = frozenset()
    with pytest.raises(InvalidGrammar, match="ends a text"):
        Guides(tokenizer)
