"""The proof: finds nothing where there is nothing, and finds what was planted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outstride import registry
from outstride.accept.match import Match
from outstride.bench.logits_inspection import logits_after
from outstride.bench.prompts import BenchPrompt, built_in
from outstride.bench.prove import prove
from outstride.core.contracts import Exactness, Method
from outstride.core.graph import Position, TokenId
from outstride.core.params import SamplingParams
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sequence import View
from outstride.draft.ngram import NGram
from outstride.draft.plain import Plain
from outstride.errors import InvalidParams, OutstrideError, UnknownMethod
from outstride.llm import LLM
from tests.bench.fake import make_llm

PROMPTS = [
    BenchPrompt("a", "one", "abcabcabc"),
    BenchPrompt("b", "one", "hello hello"),
    BenchPrompt("c", "two", "the fox and the dog and the fox"),
]


@pytest.fixture
def llm() -> Iterator[LLM]:
    with make_llm() as made:
        yield made


class TooEager(Match):
    """Settles a wrong token, from the eighth output token on."""

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        verdict = super().accept(view, proposal, scores)
        first = min(verdict.settled)
        if int(first) - view.prompt_length < 8:
            return verdict
        wrong = TokenId((int(verdict.settled[first]) + 1) % 24 + 1)
        keep = verdict.keep[: proposal.given]
        return Verdict(settled={Position(int(first)): wrong}, keep=keep)


class Breaks(Match):
    """Raises in the middle of an answer."""

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        if int(view.end) - view.prompt_length > 3:
            raise RuntimeError("planted")
        return super().accept(view, proposal, scores)


def planted(exactness: Exactness = Exactness.EXACT) -> Method:
    return Method("planted", NGram(), TooEager(), exactness)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("batch", [1, 2, 8])
def test_an_exact_method_is_equal(llm: LLM, temperature: float, batch: int) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=40, seed=3)
    seen: list[tuple[int, int]] = []
    report = prove(
        llm, "ngram", PROMPTS, params, batch=batch, alone=2, progress=lambda *now: seen.append(now)
    )
    assert report.equal
    assert not report.broken
    assert report.alone == (2 if batch > 1 else 0)
    steps = 4 * 3 + 2 * report.alone
    assert seen[-1] == (steps, steps)
    assert list(report.groups) == ["one", "two"]
    assert report.groups["one"].prompts == report.groups["one"].equal == 2
    assert report.tokens_per_pass > 1
    assert report.total.accepted > 0


def test_figures_are_those_of_the_stats(llm: LLM) -> None:
    report = prove(llm, "ngram", PROMPTS, SamplingParams(max_tokens=30), batch=4)
    for case in report.cases:
        [result] = llm.chat(case.prompt.text, SamplingParams(max_tokens=30), method="ngram")
        assert case.tokens == len(result.token_ids)
        assert case.stats.passes == result.stats.passes
        assert case.plain_stats.tokens_per_pass == 1
    groups = report.groups.values()
    mean = sum(group.emitted / group.passes for group in groups) / 2
    assert report.tokens_per_pass == pytest.approx(mean)
    assert report.summary()["groups"]["two"]["prompts"] == 1


def test_a_planted_fault_is_found_with_both_tokens_and_their_logits(llm: LLM) -> None:
    report = prove(llm, planted(), PROMPTS, SamplingParams(max_tokens=20), batch=2, alone=1)
    assert report.broken
    assert report.total.equal == 0
    first = report.cases[0]
    assert [d.batch_context for d in first.divergences] == ["batch", "alone", "mixed"]
    assert {d.method for d in first.divergences} == {"planted"}
    assert not report.baseline_differs
    found = first.divergences[0]
    assert found.position == 8
    tokens = llm.encode("abcabcabc", chat=True)
    [plain] = llm.generate(tokens, SamplingParams(max_tokens=20))
    assert found.plain.token == plain.token_ids[8]
    assert found.other.token == (found.plain.token + 1) % 24 + 1
    row = logits_after(llm, tokens + plain.token_ids[:8])
    assert found.plain.rank == 0
    assert found.plain.logit == pytest.approx(float(row[found.plain.token]))
    assert found.logit_difference == pytest.approx(
        float(row[found.plain.token] - row[found.other.token])
    )
    assert found.logit_difference is not None
    assert found.logit_difference > 0
    assert found.other.rank is not None
    assert found.other.rank > 0
    assert plain.text[:8].endswith(found.before)


def test_a_lossy_method_may_differ(llm: LLM) -> None:
    method = planted(Exactness.LOSSY)
    report = prove(llm, method, PROMPTS[:1], SamplingParams(max_tokens=20))
    assert not report.equal
    assert not report.broken
    assert report.summary()["exactness"] == "lossy"


def test_an_answer_that_ends_early_differs(llm: LLM) -> None:
    class Shorter(Match):
        """Says the end token too early."""

        def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
            verdict = super().accept(view, proposal, scores)
            if int(view.end) - view.prompt_length < 5:
                return verdict
            return Verdict({min(verdict.settled): TokenId(0)}, verdict.keep)

    method = Method("shorter", Plain(), Shorter(), Exactness.EXACT)
    report = prove(llm, method, PROMPTS[:1], SamplingParams(max_tokens=20))
    found = report.cases[0].divergences[0]
    assert found.position == 5
    assert found.other.token == 0
    assert found.finish[1] == "stop"


def test_a_method_that_fails_is_no_equal_one(llm: LLM) -> None:
    method = Method("breaks", Plain(), Breaks(), Exactness.EXACT)
    report = prove(llm, method, PROMPTS, SamplingParams(max_tokens=20), batch=8)
    assert report.broken
    assert all("planted" in (case.failure or "") for case in report.cases)


def test_several_samples_are_all_compared(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, n=3, temperature=1.0, seed=5)
    report = prove(llm, "ngram", PROMPTS[:1], params)
    assert report.equal
    assert report.cases[0].tokens > 12
    report = prove(llm, planted(), PROMPTS[:1], params)
    assert {d.sample for d in report.cases[0].divergences} == {0, 1, 2}


def test_no_seed_means_seed_zero(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=10)
    assert prove(llm, "ngram", PROMPTS, params).params.seed == 0


def test_prompts_that_neither_can_answer_prove_nothing(llm: LLM) -> None:
    long = BenchPrompt("long", "two", "x" * 600)
    report = prove(llm, "ngram", [long, *PROMPTS], SamplingParams(max_tokens=8), batch=2)
    assert report.equal
    assert report.total.prompts == 3
    assert "600" in (report.cases[0].error or "") or "context" in (report.cases[0].error or "")
    assert report.summary()["not_answered"] == 1
    with pytest.raises(OutstrideError, match="no prompt could be answered"):
        prove(llm, "ngram", [long], SamplingParams(max_tokens=8))


def test_raw_prompts_have_no_template(llm: LLM) -> None:
    report = prove(llm, "ngram", PROMPTS, SamplingParams(max_tokens=8), raw=True)
    [direct] = llm.generate("abcabcabc", SamplingParams(max_tokens=8), method="ngram")
    assert report.cases[0].stats.passes == direct.stats.passes
    assert report.equal


def test_bad_requests(llm: LLM) -> None:
    with pytest.raises(UnknownMethod, match="did you mean ngram"):
        prove(llm, "ngrm", PROMPTS)
    with pytest.raises(InvalidParams):
        prove(llm, "ngram", PROMPTS, batch=0)
    with pytest.raises(InvalidParams):
        prove(llm, "ngram", [])


def test_nothing_was_registered() -> None:
    assert "planted" not in {entry.name for entry in registry.entries()}


@pytest.mark.model
def test_ngram_on_the_default_model() -> None:
    with LLM("smollm2") as llm:
        report = prove(
            llm, "ngram", built_in()[3:5], SamplingParams(max_tokens=8), batch=2, alone=1
        )
    assert report.equal
