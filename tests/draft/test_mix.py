"""`mix` and `auto`: trees from several drafters, odds that are tracked, sizes that pay."""

from __future__ import annotations

import random

import pytest

from outstride import registry
from outstride.core.contracts import Demand
from outstride.core.guess import Guess, Odds, PerTenant, Sign
from outstride.core.params import SamplingParams
from outstride.core.sequence import View
from outstride.draft.auto import Auto
from outstride.draft.mix import Joined, State
from outstride.errors import UnknownMethod
from tests.conformance.harness import SAMPLINGS, Bench, alone, some_prompts

A, B = Sign("a", (1,)), Sign("b", (2,))


def guess(*nodes: tuple[int, int, Sign, float]) -> Guess:
    found = Guess()
    for node in nodes:
        found.add(*node)
    return found


def test_what_is_the_same_is_merged() -> None:
    one = guess((5, -1, A, 0.5), (6, 0, A, 0.5))
    two = guess((5, -1, B, 0.4), (7, 0, B, 0.3))
    joined = Joined.of([one, two], Odds())
    assert joined.guess.tokens == [5, 6, 7]
    assert joined.guess.parents == [-1, 0, 0]
    assert joined.guess.signs[0].source == "a+b"
    assert joined.claims[0] == (A, B)
    assert joined.guess.chances[0] == pytest.approx(1 - 0.5 * 0.6)


def test_best_first_and_parents_before_children() -> None:
    one = guess((5, -1, A, 0.2), (6, 0, A, 0.9), (7, -1, A, 0.6), (8, 2, A, 0.5))
    joined = Joined.of([one], Odds())
    assert [joined.guess.tokens[n] for n in joined.order] == [7, 8, 5, 6]
    assert joined.gains == pytest.approx([0.6, 0.3, 0.2, 0.18])
    assert joined.best(3).tokens == [7, 8, 5]
    assert joined.best(3).parents == [-1, 0, -1]


def test_contradiction_leaves_what_the_likelier_one_leaves() -> None:
    joined = Joined.of([guess((5, -1, A, 0.8)), guess((6, -1, B, 0.5))], Odds())
    assert joined.guess.chances == pytest.approx([0.8, 0.5 * (1 - 0.8)])
    assert joined.guess.signs[1].source == "b"
    assert joined.guess.signs[1] != B


def test_a_drafter_that_is_right_in_company_alone_is_not_trusted_alone() -> None:
    """Where both agree they are right, and where one stands alone it is wrong: both are learnt."""
    odds = Odds()
    for _ in range(60):
        for _ in range(2):
            Joined.of([guess((5, -1, A, 0.5)), guess((5, -1, B, 0.5))], odds).learn([5], odds)
        Joined.of([guess((6, -1, B, 0.5))], odds).learn([9], odds)
    agreed = Joined.of([guess((5, -1, A, 0.5)), guess((5, -1, B, 0.5))], odds)
    alone = Joined.of([guess((6, -1, B, 0.5))], odds)
    assert agreed.gains[0] > 0.8
    assert alone.gains[0] < 0.2


def test_odds_are_learnt_from_what_was_said_drafted_or_not() -> None:
    odds = Odds()
    joined = Joined.of([guess((5, -1, A, 0.5), (6, 0, A, 0.5), (7, -1, B, 0.5))], odds)
    for _ in range(40):
        joined.learn([5, 9], odds)  # 5 held; behind it 6 did not; 7 did not
    assert odds.chance(A, 0.5) == pytest.approx(0.5, abs=0.05)
    assert odds.chance(B, 0.5) < 0.1


def test_odds_fade() -> None:
    odds = Odds()
    for _ in range(2000):
        odds.learn(A, True)
    for _ in range(400):
        odds.learn(A, False)
    assert odds.chance(A, 0.5) < 0.3


def test_odds_of_a_sequence_rest_on_those_of_everybody() -> None:
    everybody = Odds()
    for _ in range(50):
        Odds(everybody).learn(A, True)
    assert Odds(everybody).chance(A, 0.1) > 0.85


def test_tenants_are_apart_and_few() -> None:
    tenants = PerTenant(list[int], most=2)
    tenants.of("x").append(1)
    assert tenants.of("y") == []
    assert tenants.of("x") == [1]
    tenants.of("z")
    assert tenants.of("y") == []
    assert tenants.of("z") == []


@pytest.mark.parametrize("part", ["plain+draft", "lookahead", "nothing"])
def test_only_drafters_that_need_no_pass_can_be_joined(part: str) -> None:
    with pytest.raises(UnknownMethod):
        registry.build(f"mix:parts={part}")


def test_a_mix_accepts_more_than_its_parts() -> None:
    prompts, params = some_prompts(2, 16), SamplingParams(max_tokens=60, ignore_eos=True)
    passes = {}
    for spec in ("suffix", "recycle:size=8", "mix:nodes=24"):
        found = Bench(pages=400, nodes=512).run(prompts, registry.build(spec), params)
        passes[spec] = sum(s.counts.passes for s in found)
    assert passes["mix:nodes=24"] <= min(passes.values())


@pytest.mark.parametrize("curve", [{1: 1.0, 64: 1.0}, {1: 1.0, 64: 8.0}, {1: 1.0, 64: 64.0}])
@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_auto_is_plain_whatever_passes_cost(curve: dict[int, float], sampling: str) -> None:
    prompts, params = some_prompts(8, 8), SAMPLINGS[sampling]
    bench = Bench(cost=curve)
    found = bench.run(prompts, registry.build("auto"), params)
    assert [s.output for s in found] == [alone(p, params) for p in prompts]
    drafted = sum(s.counts.proposed for s in found)
    assert (drafted == 0) == (curve[64] == 64.0)


def test_auto_says_what_it_expected_and_who_was_right() -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    found = Bench(pages=400, cost={1: 1.0, 64: 1.2}).run(
        some_prompts(2, 12), registry.build("auto"), params
    )
    for sequence in found:
        counts = sequence.counts
        assert sum(counts.sources.values()) == counts.accepted
        assert 0 < counts.drafts <= counts.passes
    expected = sum(s.counts.expected for s in found)
    accepted = sum(s.counts.accepted for s in found)
    assert 0.5 < accepted / expected < 2.0


def test_auto_notices_a_drafter_that_is_never_right() -> None:
    """On text that does not repeat, it goes back to plain."""
    params = SamplingParams(max_tokens=200, temperature=3.0, seed=5, ignore_eos=True)
    bench = Bench(pages=400, cost={1: 1.0, 64: 20.0})
    [sequence] = bench.run(some_prompts(2, 1), registry.build("auto"), params)
    late = [p for p in sequence.trace if p.step > 100]
    assert sum(p.kind == "plain" for p in late) > 0.9 * len(late)


def test_drafts_in_vain_do_not_make_auto_look_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[View] = []
    usual = Auto._weighed

    def weighed(self: Auto, view: View, state: State) -> Demand:
        looks.append(view)
        return usual(self, view, state)

    monkeypatch.setattr(Auto, "_weighed", weighed)
    params = SamplingParams(max_tokens=200, temperature=3.0, seed=6, ignore_eos=True)
    bench = Bench(pages=400, cost={1: 1.0, 64: 6.0})
    [sequence] = bench.run(some_prompts(2, 1), registry.build("auto"), params)
    assert sequence.counts.drafts > 3
    assert len(looks) < 60  # 16 in a row, then one in eight, then one in sixteen


def test_chances_of_many_signs_are_those_of_each() -> None:
    rng, base = random.Random(3), Odds(weight=12.0)
    odds = Odds(base)
    signs = [Sign("suffix", (i % 5, i % 3)) for i in range(30)]
    for _ in range(200):
        (odds if rng.random() < 0.5 else base).learn(rng.choice(signs[:20]), rng.random() < 0.4)
    priors = [rng.random() for _ in signs]
    each = [odds.chance(sign, prior) for sign, prior in zip(signs, priors, strict=True)]
    assert odds.chances(signs, priors) == each
