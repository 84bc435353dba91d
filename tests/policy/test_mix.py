"""`mix` and `auto`: trees from several drafters, tracked acceptance rates, sizes that pay."""

from __future__ import annotations

import random

import pytest

from outstride import registry
from outstride.core.contracts import Demand
from outstride.core.draft_tree import AcceptanceEstimator, AcceptanceKey, DraftTree, PerPrefixKey
from outstride.core.params import SamplingParams
from outstride.core.prefix_key import PrefixKey
from outstride.core.sequence import View
from outstride.errors import UnknownMethod
from outstride.policy.auto import Auto
from outstride.policy.joined_tree import JoinedTree
from outstride.policy.mix import MixState
from tests.conformance.harness import SAMPLINGS, Bench, alone, some_prompts

A, B = AcceptanceKey("a", (1,)), AcceptanceKey("b", (2,))


def tree_of(*nodes: tuple[int, int, AcceptanceKey, float]) -> DraftTree:
    found = DraftTree()
    for node in nodes:
        found.add(*node)
    return found


def test_equal_nodes_are_merged() -> None:
    one = tree_of((5, -1, A, 0.5), (6, 0, A, 0.5))
    two = tree_of((5, -1, B, 0.4), (7, 0, B, 0.3))
    joined = JoinedTree.of([one, two], AcceptanceEstimator())
    assert joined.tree.tokens == [5, 6, 7]
    assert joined.tree.parents == [-1, 0, 0]
    assert joined.tree.keys[0].source == "a+b"
    assert joined.claims[0] == (A, B)
    assert joined.tree.rates[0] == pytest.approx(1 - 0.5 * 0.6)


def test_best_first_and_parents_before_children() -> None:
    one = tree_of((5, -1, A, 0.2), (6, 0, A, 0.9), (7, -1, A, 0.6), (8, 2, A, 0.5))
    joined = JoinedTree.of([one], AcceptanceEstimator())
    assert [joined.tree.tokens[n] for n in joined.order] == [7, 8, 5, 6]
    assert joined.gains == pytest.approx([0.6, 0.3, 0.2, 0.18])
    assert joined.best(3).tokens == [7, 8, 5]
    assert joined.best(3).parents == [-1, 0, -1]


def test_a_contradicting_node_gets_the_rate_that_is_left() -> None:
    joined = JoinedTree.of(
        [tree_of((5, -1, A, 0.8)), tree_of((6, -1, B, 0.5))], AcceptanceEstimator()
    )
    assert joined.tree.rates == pytest.approx([0.8, 0.5 * (1 - 0.8)])
    assert joined.tree.keys[1].source == "b"
    assert joined.tree.keys[1] != B


def test_a_drafter_that_is_right_only_when_another_agrees_gets_a_low_rate_alone() -> None:
    """Where both agree they are right, and where one is alone it is wrong: both are learned."""
    estimator = AcceptanceEstimator()
    for _ in range(60):
        for _ in range(2):
            JoinedTree.of([tree_of((5, -1, A, 0.5)), tree_of((5, -1, B, 0.5))], estimator).learn(
                [5], estimator
            )
        JoinedTree.of([tree_of((6, -1, B, 0.5))], estimator).learn([9], estimator)
    agreed = JoinedTree.of([tree_of((5, -1, A, 0.5)), tree_of((5, -1, B, 0.5))], estimator)
    alone = JoinedTree.of([tree_of((6, -1, B, 0.5))], estimator)
    assert agreed.gains[0] > 0.8
    assert alone.gains[0] < 0.2


def test_rates_are_learned_from_settled_tokens_drafted_or_not() -> None:
    estimator = AcceptanceEstimator()
    joined = JoinedTree.of([tree_of((5, -1, A, 0.5), (6, 0, A, 0.5), (7, -1, B, 0.5))], estimator)
    for _ in range(40):
        joined.learn([5, 9], estimator)  # 5 was accepted; after it 6 was not; nor was 7
    assert estimator.rate(A, 0.5) == pytest.approx(0.5, abs=0.05)
    assert estimator.rate(B, 0.5) < 0.1


def test_rates_fade() -> None:
    estimator = AcceptanceEstimator()
    for _ in range(2000):
        estimator.learn(A, True)
    for _ in range(400):
        estimator.learn(A, False)
    assert estimator.rate(A, 0.5) < 0.3


def test_rates_of_a_sequence_start_from_shared_ones() -> None:
    shared = AcceptanceEstimator()
    for _ in range(50):
        AcceptanceEstimator(shared).learn(A, True)
    assert AcceptanceEstimator(shared).rate(A, 0.1) > 0.85


def test_tenants_are_apart_and_few() -> None:
    tenants = PerPrefixKey(list[int], max_keys=2)
    x, y, z = (PrefixKey(tenant=name) for name in "xyz")
    tenants.of(x).append(1)
    assert tenants.of(y) == []
    assert tenants.of(x) == [1]
    tenants.of(z)
    assert tenants.of(y) == []
    assert tenants.of(z) == []


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


def test_auto_reports_expected_tokens_and_their_sources() -> None:
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


def test_rejected_drafts_do_not_make_auto_look_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[View] = []
    usual = Auto._tree_demand

    def tree_demand(self: Auto, view: View, state: MixState) -> Demand:
        looks.append(view)
        return usual(self, view, state)

    monkeypatch.setattr(Auto, "_tree_demand", tree_demand)
    params = SamplingParams(max_tokens=200, temperature=3.0, seed=6, ignore_eos=True)
    bench = Bench(pages=400, cost={1: 1.0, 64: 6.0})
    [sequence] = bench.run(some_prompts(2, 1), registry.build("auto"), params)
    assert sequence.counts.drafts > 3
    assert len(looks) < 60  # 16 in a row, then one in eight, then one in sixteen


def test_rates_of_many_keys_are_those_of_each() -> None:
    rng, base = random.Random(3), AcceptanceEstimator(weight=12.0)
    estimator = AcceptanceEstimator(base)
    keys = [AcceptanceKey("suffix", (i % 5, i % 3)) for i in range(30)]
    for _ in range(200):
        (estimator if rng.random() < 0.5 else base).learn(rng.choice(keys[:20]), rng.random() < 0.4)
    priors = [rng.random() for _ in keys]
    each = [estimator.rate(key, prior) for key, prior in zip(keys, priors, strict=True)]
    assert estimator.rates(keys, priors) == each
