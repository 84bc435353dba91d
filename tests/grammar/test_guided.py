"""Constrained answers are the same under every exact method, and what is forced costs no passes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import jsonschema
import pytest

from outstride import LLM, SamplingParams, registry
from outstride.core.contracts import Demand, Drafter, Guessing
from outstride.core.guess import Guess, Sign
from outstride.core.sequence import Sequence, View
from outstride.core.shape import Shape
from outstride.grammar.guide import Guides
from outstride.grammar.guided import Guided, guided
from tests.serve import tiny

SCHEMA = {
    "type": "object",
    "properties": {
        "description": {"type": "string", "maxLength": 12},
        "amount": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["interesting", "boring"]},
    },
    "required": ["description", "amount", "kind"],
    "additionalProperties": False,
}
SHAPES = (
    Shape("json_schema", json.dumps(SCHEMA)),
    Shape("regex", "(the thing is )+(big|small) and it is blue"),
    Shape("ebnf", 'root ::= "[" item ("," item)* "]"\nitem ::= "in" | "the" | [0-9]'),
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(str(tiny.make(tmp_path_factory.mktemp("tiny"))), pages=256) as found:
        yield found


def answer(llm: LLM, spec: str, shape: Shape, params: SamplingParams) -> Sequence:
    guides = Guides(llm.tokenizer, llm.model.vocab_size)
    guide = guides.compile(shape, params.max_tokens)
    method = guided(registry.build(spec), guide)
    prompt = llm.encode("give me the thing in JSON", chat=True)
    sequence = llm.engine.submit(prompt, params, method, grammar=guide)
    while llm.engine.busy:
        llm.engine.step()
        llm.engine.check_integrity()
    assert sequence.error is None
    return sequence


def exact() -> list[str]:
    registry.discover()
    return [
        entry.name
        for entry in registry.entries()
        if entry.exactness.value == "exact" and not entry.needs and entry.name != "plain"
    ]


@pytest.mark.parametrize("spec", exact())
def test_the_same_answer_under_every_exact_method(llm: LLM, spec: str) -> None:
    for number, shape in enumerate(SHAPES):
        for temperature in (0.0, 0.9):
            params = SamplingParams(max_tokens=120, temperature=temperature, seed=number)
            plain = answer(llm, "plain", shape, params)
            found = answer(llm, spec, shape, params)
            assert found.output == plain.output, (shape, temperature)
            assert found.finish_reason == "stop"


def test_what_is_forced_costs_no_passes(llm: LLM) -> None:
    params = SamplingParams(max_tokens=120)
    plain = answer(llm, "plain", SHAPES[0], params)
    found = answer(llm, "ngram", SHAPES[0], params)
    jsonschema.validate(json.loads(llm.tokenizer.decode(found.output)), SCHEMA)
    assert plain.counts.passes == plain.counts.emitted
    assert found.counts.sources["grammar"] > 20
    assert found.counts.passes < 0.7 * plain.counts.passes


class Everything(Drafter):
    """Drafts every token of the vocabulary as the next one, and another behind each."""

    name = "everything"

    def demand(self, view: View) -> Demand:
        return Demand(most=200, gain=1.0)

    def guess(self, view: View, room: int) -> Guessing:
        yield from ()
        guess = Guess()
        for token in range(min(room // 2, 100)):
            guess.add(100, guess.add(token, -1, Sign("any"), 0.1), Sign("any"), 0.1)
        return guess


def test_drafts_against_the_shape_never_reach_the_pass(llm: LLM) -> None:
    digits = {llm.tokenizer.encode(c)[0] for c in "0123456789"}
    assert max(digits) < 100
    guide = Guides(llm.tokenizer, llm.model.vocab_size).compile(Shape("regex", "[0-9]{9}"))
    method = guided(replace(registry.build("ngram"), drafter=Everything()), guide)
    assert isinstance(method.drafter, Guided)
    params = SamplingParams(max_tokens=40)
    sequence = llm.engine.submit(llm.encode("x", chat=True), params, method, grammar=guide)
    while llm.engine.busy:
        llm.engine.step()
    assert set(sequence.output[:-1]) <= digits
    assert len(sequence.output) == 10
    assert sequence.counts.proposed <= 10 * sequence.counts.passes
    assert sequence.counts.accepted > 0


def test_samples_of_one_request_follow_the_shape_apart(llm: LLM) -> None:
    params = SamplingParams(max_tokens=120, n=3, temperature=1.2, seed=5)
    guide = Guides(llm.tokenizer, llm.model.vocab_size).compile(SHAPES[0], params.max_tokens)
    method = guided(registry.build("auto"), guide)
    leader = llm.engine.submit(llm.encode("x", chat=True), params, method, grammar=guide)
    while llm.engine.busy:
        llm.engine.step()
    texts = [llm.tokenizer.decode(s.output) for s in leader.group]
    assert len(set(texts)) == 3
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_plain_and_lossy_methods_stay_as_they_are(llm: LLM) -> None:
    guide = Guides(llm.tokenizer).compile(SHAPES[1])
    for spec in ("plain", "confident", "lookahead"):
        method = registry.build(spec)
        assert guided(method, guide) is method
    assert guided(registry.build("auto"), guide).drafter.weighed
