"""Structured output is the same under every exact method, and forced text costs no passes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import jsonschema
import pytest

from outstride import LLM, SamplingParams, registry
from outstride.core.contracts import Demand, Drafter, DraftRounds
from outstride.core.draft_tree import AcceptanceKey, DraftTree
from outstride.core.sequence import Sequence, View
from outstride.core.structured_output import OutputFormat
from outstride.grammar.guided import GuidedDrafter, guided
from outstride.grammar.matcher import GrammarCompiler
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
    OutputFormat("json_schema", json.dumps(SCHEMA)),
    OutputFormat("regex", "(the thing is )+(big|small) and it is blue"),
    OutputFormat("ebnf", 'root ::= "[" item ("," item)* "]"\nitem ::= "in" | "the" | [0-9]'),
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(str(tiny.make(tmp_path_factory.mktemp("tiny"))), pages=256) as found:
        yield found


def answer(llm: LLM, spec: str, shape: OutputFormat, params: SamplingParams) -> Sequence:
    guides = GrammarCompiler(llm.tokenizer, llm.model.vocab_size)
    matcher = guides.compile(shape, params.max_tokens)
    method = guided(registry.build(spec), matcher)
    prompt = llm.encode("give me the thing in JSON", chat=True)
    sequence = llm.engine.submit(prompt, params, method, grammar=matcher)
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


def test_jump_forward_costs_no_passes(llm: LLM) -> None:
    params = SamplingParams(max_tokens=120)
    plain = answer(llm, "plain", SHAPES[0], params)
    found = answer(llm, "ngram", SHAPES[0], params)
    jsonschema.validate(json.loads(llm.tokenizer.decode(found.output)), SCHEMA)
    assert plain.counts.passes == plain.counts.emitted
    assert found.counts.sources["grammar"] > 20
    assert found.counts.passes < 0.7 * plain.counts.passes


class Everything(Drafter):
    """Drafts every token of the vocabulary as the next one, and another one after each."""

    name = "everything"

    def demand(self, view: View) -> Demand:
        return Demand(max_nodes=200, gain=1.0)

    def draft_tree(self, view: View, budget: int) -> DraftRounds:
        yield from ()
        guess = DraftTree()
        for token in range(min(budget // 2, 100)):
            guess.add(
                100, guess.add(token, -1, AcceptanceKey("any"), 0.1), AcceptanceKey("any"), 0.1
            )
        return guess


def test_forbidden_drafts_never_reach_the_pass(llm: LLM) -> None:
    digits = {llm.tokenizer.encode(c)[0] for c in "0123456789"}
    assert max(digits) < 100
    matcher = GrammarCompiler(llm.tokenizer, llm.model.vocab_size).compile(
        OutputFormat("regex", "[0-9]{9}")
    )
    method = guided(replace(registry.build("ngram"), drafter=Everything()), matcher)
    assert isinstance(method.drafter, GuidedDrafter)
    params = SamplingParams(max_tokens=40)
    sequence = llm.engine.submit(llm.encode("x", chat=True), params, method, grammar=matcher)
    while llm.engine.busy:
        llm.engine.step()
    assert set(sequence.output[:-1]) <= digits
    assert len(sequence.output) == 10
    assert sequence.counts.proposed <= 10 * sequence.counts.passes
    assert sequence.counts.accepted > 0


def test_each_sample_of_a_request_follows_the_grammar(llm: LLM) -> None:
    params = SamplingParams(max_tokens=120, n=3, temperature=1.2, seed=5)
    matcher = GrammarCompiler(llm.tokenizer, llm.model.vocab_size).compile(
        SHAPES[0], params.max_tokens
    )
    method = guided(registry.build("auto"), matcher)
    leader = llm.engine.submit(llm.encode("x", chat=True), params, method, grammar=matcher)
    while llm.engine.busy:
        llm.engine.step()
    texts = [llm.tokenizer.decode(s.output) for s in leader.group]
    assert len(set(texts)) == 3
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_plain_and_lossy_methods_are_not_wrapped(llm: LLM) -> None:
    matcher = GrammarCompiler(llm.tokenizer).compile(SHAPES[1])
    for spec in ("plain", "confident", "lookahead"):
        method = registry.build(spec)
        assert guided(method, matcher) is method
    assert guided(registry.build("auto"), matcher).drafter.cost_aware
