"""The tests of distributions: calibrated, and as sensitive as they say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from outstride import registry
from outstride.accept.rejection import RejectionSampler
from outstride.bench import chi_square
from outstride.bench.logits_inspection import logits_after, rank_positions
from outstride.bench.prompts import BenchPrompt
from outstride.bench.prove import prove
from outstride.core.contracts import Method
from outstride.core.params import SamplingParams
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sampling import SamplingSpec, probabilities
from outstride.core.sequence import View
from outstride.errors import InvalidParams
from outstride.llm import LLM
from outstride.models.toy import Toy
from tests.bench.fake import ALPHABET, make_llm

PROMPTS = [BenchPrompt(str(i), "one", text) for i, text in enumerate(["abcabc", "the fox", "1 2"])]
PARAMS = SamplingParams(temperature=0.9, seed=3, max_tokens=40, n=4, ignore_eos=True)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with make_llm() as made:
        accent = Toy(vocab_size=len(ALPHABET), pages=256, page_size=4, habit=4.0, accent=1)
        made.engine.add_model("small", accent)
        yield made


def drafted(name: str = "rejection") -> Method:
    return registry.build(f"{name}:model=small")


def test_a_place_is_the_mass_of_likelier_tokens() -> None:
    row = np.asarray([0.2, 0.5, 0.2, 0.1, 0.0], dtype=np.float32)
    assert chi_square.rank_position(row, 1, 0.0) == 0.0
    assert chi_square.rank_position(row, 0, 0.0) == pytest.approx(0.5)
    assert chi_square.rank_position(row, 2, 0.5) == pytest.approx(
        0.8
    )  # among equals the lower id comes first
    assert chi_square.rank_position(row, 3, 0.9999999) < 1
    assert chi_square.rank_position(row, 4, 0.5) == -1


@pytest.mark.parametrize(("freedom", "alpha", "excess"), [(15, 0.01, 20.0), (3, 0.05, 6.0)])
def test_power_is_that_of_a_simulation(freedom: int, alpha: float, excess: float) -> None:
    rng = np.random.default_rng(0)
    bar = np.quantile(rng.chisquare(freedom, 400_000), 1 - alpha)
    seen = (rng.noncentral_chisquare(freedom, excess, 400_000) > bar).mean()
    assert chi_square.power(freedom, alpha, excess) == pytest.approx(seen, abs=0.01)
    needed = chi_square.excess_for(freedom, alpha)
    assert chi_square.power(freedom, alpha, needed) == pytest.approx(chi_square.POWER, abs=1e-6)


def uniform(
    rng: np.random.Generator, texts: int = 8, tokens: int = 100
) -> list[list[chi_square.Numbers]]:
    return [[rng.random(tokens) for _ in range(2)] for _ in range(texts)]


def test_the_honest_are_seldom_accused() -> None:
    rng = np.random.default_rng(1)
    accused = sum(not chi_square.run_tests(uniform(rng)).holds for _ in range(600))
    assert accused <= 16  # 1 in 100, and 16 or fewer of 600 in 99.9% of cases


def test_a_shift_of_the_stated_size_is_found_as_often_as_stated() -> None:
    rng, found, tops = np.random.default_rng(2), 0, np.full(1, 0.4)
    stated = chi_square.run_tests(uniform(rng))
    chi_square.estimate_power(stated, tops)
    for _ in range(200):
        texts = uniform(rng)
        for samples in texts:
            for text in samples:  # the likeliest token instead of a drawn one
                greedy = rng.random(len(text)) < stated.greedy_share
                text[greedy] = rng.random(int(greedy.sum())) * 0.4
        found += not chi_square.run_tests(texts).holds
    assert found / 200 > chi_square.POWER - 0.07


def test_dependence_is_found() -> None:
    rng = np.random.default_rng(3)
    texts = uniform(rng, tokens=200)
    for samples in texts:
        samples[1][:] = samples[0]  # the same answer twice
    report = chi_square.run_tests(texts)
    assert report.tests[2].p is not None
    assert report.tests[2].p < 1e-9
    for samples in texts:
        for text in samples:
            text[1::2] = text[::2]
    assert chi_square.run_tests(texts).tests[1].p == pytest.approx(0, abs=1e-9)


def test_few_tokens_prove_nothing() -> None:
    report = chi_square.run_tests([[np.full(20, 0.1)]])
    chi_square.estimate_power(report, np.full(1, 0.5))
    assert not report.tested
    assert report.holds
    assert report.shifted_share == 1


def test_replaying_a_text_gives_its_places(llm: LLM) -> None:
    prompt = llm.encode("abcabc")
    params = replace(PARAMS, frequency_penalty=0.5, top_p=0.9, n=1)
    [result] = llm.generate([prompt], params)
    [places], tops = rank_positions(llm, prompt, [result.token_ids], params, 0)
    assert len(places) == len(tops) == len(result.token_ids)
    assert (places >= 0).all()
    [wrong], _ = rank_positions(llm, prompt, [[t % 40 + 1 for t in result.token_ids]], params, 0)
    assert (wrong < 0).any()  # top-p leaves them no chance
    row = probabilities(logits_after(llm, prompt), SamplingSpec(temperature=0.9, top_p=0.9))
    assert tops[0] == pytest.approx(float(row.max()))


@pytest.mark.parametrize("name", ["rejection", "rsd", "block-verify"])
def test_methods_that_keep_the_distribution_pass(llm: LLM, name: str) -> None:
    report = prove(llm, drafted(name), PROMPTS, PARAMS)
    assert report.distribution is not None
    assert report.distribution.tested
    assert not report.broken
    assert report.distribution.shifted_share < 0.2
    assert report.total.accepted > 0


class Generous(RejectionSampler):
    """Keeps whatever was drafted, likely or not: the draft model's text, not the target's."""

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        assert scores.rows is not None
        for node in range(proposal.given, len(proposal.graph)):
            scores.rows[:, proposal.graph.tokens[node]] = 1.0
        return super().accept(view, proposal, scores)


def test_a_rule_that_accepts_too_much_is_found(llm: LLM) -> None:
    report = prove(llm, replace(drafted(), acceptor=Generous()), PROMPTS, PARAMS)
    assert report.broken
    assert report.distribution is not None
    assert not report.distribution.holds


def test_greedy_answers_are_compared_token_for_token(llm: LLM) -> None:
    report = prove(llm, drafted(), PROMPTS, replace(PARAMS, temperature=0.0, n=1))
    assert report.distribution is None
    assert report.equal
    report = prove(
        llm, replace(drafted(), acceptor=Generous()), PROMPTS, SamplingParams(max_tokens=24)
    )
    assert report.broken


def test_a_distribution_on_a_canvas_is_not_judged() -> None:
    with make_llm() as llm, pytest.raises(InvalidParams, match="no test for that"):
        prove(llm, "any-subset", PROMPTS, PARAMS)
