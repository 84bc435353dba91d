"""The cost model, and draft nodes that are cost_aware by it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from outstride import registry
from outstride.cache.pool import PagePool
from outstride.core.contracts import Demand, Drafter, DraftRounds, PassInput, PendingPass
from outstride.core.draft_tree import AcceptanceKey, DraftTree
from outstride.core.params import SamplingParams
from outstride.core.proposal import TARGET, Proposal, Scores, Verdict
from outstride.core.sequence import View
from outstride.engine.engine import Engine
from outstride.models.toy import Toy
from outstride.policy import profiling
from outstride.policy.cost_model import CostModel, DraftSource
from outstride.policy.cost_prior import SIZES
from outstride.policy.profiling import measure
from tests.conformance.harness import Bench, alone, some_prompts, toy_method


def test_the_curve_is_linear_between_knots_and_continues() -> None:
    curve = CostModel({1: 1.0, 2: 2.0, 4: 3.0}).curve(6)
    assert curve[1:] == pytest.approx([1.0, 2.0, 2.5, 3.0, 3.5, 4.0])


def test_more_nodes_never_cost_less() -> None:
    assert CostModel({1: 2.0, 2: 1.0, 4: 3.0}).curve(4)[1:] == pytest.approx([1.5, 1.5, 2.25, 3.0])


def test_a_knot_below_its_neighbours_does_not_sink() -> None:
    """Eight nodes cost what four cost: whatever the curve said before, it ends up saying so."""
    cost = CostModel({1: 1.0, 4: 2.0, 8: 1.0, 64: 8.0})
    for _ in range(1000):
        cost.observe(4, 1.5)
        cost.observe(8, 1.5)
        cost.observe(1, 1.0)
    assert cost.knots[1] == pytest.approx(1.0, rel=0.15)
    assert cost.knots[4] == pytest.approx(1.5, rel=0.15)
    assert cost.knots[8] == pytest.approx(1.5, rel=0.15)


@pytest.mark.parametrize("knots", [{}, {0: 1.0}, {1: 0.0}])
def test_a_curve_needs_positive_seconds(knots: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="needs positive seconds"):
        CostModel(knots)


def test_slower_steps_make_larger_passes_look_slower_but_not_smaller_ones() -> None:
    """Other programs slow down passes that compute, and hardly those that wait for memory."""
    cost = CostModel({1: 1.0, 4: 1.5, 8: 2.0, 64: 4.0})
    for _ in range(60):
        cost.observe(8, 3.0)
    assert cost.knots == pytest.approx({1: 1.0, 4: 1.5, 8: 3.0, 64: 6.0}, rel=0.02)
    for _ in range(60):
        cost.observe(1, 1.5)
    assert cost.knots[1] == pytest.approx(1.5, rel=0.02)


def test_faster_steps_make_all_passes_look_faster() -> None:
    """Otherwise drafts would look expensive next to plain passes, and never be tried again."""
    cost = CostModel({1: 1.0, 4: 1.5, 8: 2.0, 64: 4.0})
    for _ in range(20):
        cost.observe(1, 0.5)
    assert cost.knots == pytest.approx({1: 0.5, 4: 0.75, 8: 1.0, 64: 2.0}, rel=0.02)
    cost = CostModel({1: 1.0, 4: 1.5, 8: 2.0, 64: 4.0})
    for _ in range(20):
        cost.observe(8, 1.0)
    assert cost.knots == pytest.approx({1: 0.5, 4: 0.75, 8: 1.0, 64: 2.0}, rel=0.02)


def test_a_wrong_knot_is_corrected() -> None:
    """Steps of both sizes say what each costs; the curve ends up between them."""
    cost = CostModel({1: 1.0, 8: 1.0, 64: 8.0})
    for _ in range(400):
        cost.observe(1, 1.0)
        cost.observe(8, 2.0)
    assert cost.knots[8] / cost.knots[1] == pytest.approx(2.0, rel=0.15)


def test_one_interruption_changes_little() -> None:
    cost = CostModel({1: 1.0, 8: 2.0})
    cost.observe(1, 500.0)
    assert cost.knots[1] < 1.3


def test_a_frozen_curve_stays() -> None:
    cost = CostModel({1: 1.0, 8: 2.0}, frozen=True)
    cost.observe(1, 5.0)
    assert cost.knots == {1: 1.0, 8: 2.0}


def test_the_cost_of_drafting_is_learned_apart() -> None:
    cost = CostModel({1: 1.0, 8: 2.0})
    assert cost.draft_seconds(1, DraftSource.LOOKUP) < cost.draft_seconds(1, DraftSource.HEAD) < 1.0
    for _ in range(60):
        cost.observe_drafting(1, 0.6, DraftSource.HEAD)
        cost.observe_drafting(3, 0.34, DraftSource.LOOKUP)
    assert cost.draft_seconds(1, DraftSource.HEAD) == pytest.approx(0.6, rel=0.01)
    assert cost.draft_seconds(3, DraftSource.LOOKUP) == pytest.approx(0.34, rel=0.01)
    assert cost.knots == {1: 1.0, 8: 2.0}
    frozen = CostModel({1: 1.0}, frozen=True)
    frozen.observe_drafting(1, 9.0, DraftSource.HEAD)
    assert frozen.draft_seconds(1, DraftSource.HEAD) < 1.0


def test_a_slow_phase_does_not_decide_for_good() -> None:
    """Otherwise a head that was slow for a while would never be used again."""
    cost = CostModel({1: 1.0, 8: 2.0})
    for seconds in [0.1] * 100 + [0.9] * 20:
        cost.observe_drafting(1, seconds, DraftSource.HEAD)
    assert cost.draft_seconds(1, DraftSource.HEAD) == pytest.approx(0.9)
    for _ in range(128):
        cost.observe_no_head()
    assert cost.draft_seconds(1, DraftSource.HEAD) == pytest.approx(0.1)


class SlowDrafter(Drafter):
    """Takes long, and its drafts are wrong."""

    def __init__(self, *, cost_aware: bool) -> None:
        self.cost_aware = cost_aware

    def demand(self, view: View) -> Demand:
        return Demand(max_nodes=2, gain=0.1) if view.num_uncomputed() == 1 else Demand()

    def draft_tree(self, view: View, room: int) -> DraftRounds:
        yield from ()
        time.sleep(0.02)
        guess = DraftTree()
        guess.add_run([1] * min(room, view.limit - view.end - 1), AcceptanceKey("slow"), 0.1)
        return guess


@pytest.mark.parametrize("cost_aware", [True, False])
def test_a_slow_drafter_does_not_make_passes_look_expensive(cost_aware: bool) -> None:
    """Otherwise plain steps would look expensive, too, and drafting cheap.

    Nor does a drafter that is not cost-aware make drafts look expensive for those that are.
    """
    bench = Bench()
    bench.engine.cost = cost = CostModel({1: 0.001, 64: 0.002})
    method = toy_method(SlowDrafter(cost_aware=cost_aware), registry.build("plain").acceptor)
    bench.run(some_prompts(5, 1), method, SamplingParams(max_tokens=34, ignore_eos=True))
    assert (cost.draft_seconds(1, DraftSource.LOOKUP) > 0.008) == cost_aware
    assert cost.knots[1] < 0.01


class BackingOff(Drafter):
    """Skips three steps, then watches one."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.told: list[int] = []

    def demand(self, view: View) -> Demand:
        self.asked.append(view.steps)
        return Demand(skip_steps=3 if len(self.asked) % 2 else 0)

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> None:
        self.told.append(view.steps)


def test_a_drafter_that_backs_off_is_neither_asked_nor_told() -> None:
    """Its own steps count; the first one is the step in which it was asked."""
    drafter = BackingOff()
    method = toy_method(drafter, registry.build("plain").acceptor)
    bench = Bench()
    bench.run(some_prompts(5, 1), method, SamplingParams(max_tokens=14, ignore_eos=True))
    decoding = [step for step in drafter.asked if step]
    assert drafter.asked[0] == 0
    assert decoding == [3, 4, 7, 8, 11, 12]
    assert drafter.told == [4, 8, 12]


@pytest.mark.parametrize(
    ("name", "seen"), [("plain", True), ("early-exit:layer=1,length=1", False)]
)
def test_passes_over_some_layers_do_not_correct_the_curve(name: str, seen: bool) -> None:
    bench = Bench()
    bench.engine.cost = cost = CostModel({1: 50.0, 64: 60.0})
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    bench.run([[5]], registry.build(name), params)
    assert (cost.knots[1] < 20.0) == seen


def test_measuring_leaves_no_trace() -> None:
    toy = Toy(pages=80)
    pool = PagePool(toy.pages, toy.page_size)
    cost = measure(toy, pool, 64)
    assert cost is not None
    assert set(cost.knots) == set(SIZES)
    assert pool.available == 80
    pool.check_integrity([])


def test_costs_can_be_prepared_before_the_first_request() -> None:
    engine, known = Engine({TARGET: Toy(pages=80)}), list[CostModel | None]()
    for name in ("plain", "auto:from=none"):
        engine.warm_up(registry.build(name))
        known.append(engine.cost)
    assert known[0] is None  # plain does not need it
    assert known[1] is not None
    engine.submit([5], SamplingParams(max_tokens=2), registry.build("auto:from=none"))
    assert engine.cost is known[1]


class FlatToy(Toy):
    """Takes as long for many nodes as for one; as on a GPU, the first two of a kind take longer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._seen = Counter[tuple[int, int]]()
        self.now = 0.0
        """Simulated seconds."""

    def forward(self, work: Sequence[PassInput]) -> PendingPass:
        proposal = work[0].proposal
        kind = len(proposal.graph), proposal.given
        self._seen[kind] += 1
        self.now += 0.01 if self._seen[kind] > 2 else 0.06
        return super().forward(work)


def test_where_nodes_cost_nothing_prefill_is_not_chunked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And a step with prefill says nothing about the cost of nodes."""
    toy = FlatToy(pages=80)
    monkeypatch.setattr(profiling, "time", SimpleNamespace(perf_counter=lambda: toy.now))
    cost = measure(toy, PagePool(toy.pages, toy.page_size), 256)
    assert cost is not None
    assert cost.prefill.flat
    before = cost.prefill.per_node
    cost.observe(20, 0.06, [(16, 0)], [(1, 50), (1, 60)])
    assert cost.prefill.per_node == before
    assert cost.prefill.max_nodes(0.02, 50) > 500


def test_without_room_nothing_is_measured() -> None:
    toy = Toy(pages=4)
    assert measure(toy, PagePool(toy.pages, toy.page_size), 64) is None


class Offering(Drafter):
    """Offers nodes with given gains, whatever they are."""

    cost_aware = True

    def __init__(self, gains: tuple[float, ...]) -> None:
        self._gains = gains

    def demand(self, view: View) -> Demand:
        return Demand(gains=self._gains) if view.num_uncomputed() == 1 else Demand()

    def draft_tree(self, view: View, room: int) -> DraftRounds:
        yield from ()
        guess = DraftTree()
        guess.add_run([1] * min(room, view.limit - view.end - 1), AcceptanceKey("offer"), 0.5)
        return guess


def nodes_drafted(bench: Bench, gains: tuple[float, ...], others: int = 0) -> float:
    """Nodes per pass that a sequence was granted, on average."""
    acceptor = registry.build("plain").acceptor
    method = toy_method(Offering(gains), acceptor)
    params = SamplingParams(max_tokens=30, ignore_eos=True, seed=1)
    prompts = some_prompts(3, 1 + others)
    found = bench.run(prompts, method, params)
    for prompt, sequence in zip(prompts, found, strict=True):
        assert sequence.output == alone(prompt, params)
    first = found[0].counts
    return first.proposed / (first.passes - 1)


def test_nodes_that_cost_nothing_are_all_taken() -> None:
    assert nodes_drafted(Bench(cost={1: 1.0, 64: 1.0}), (0.5, 0.2, 0.05)) > 2.5


def test_nodes_that_cost_a_pass_each_are_not_taken() -> None:
    assert nodes_drafted(Bench(cost={1: 1.0, 64: 64.0}), (0.5, 0.2, 0.05)) == 0


def test_only_nodes_worth_their_cost_are_taken() -> None:
    """A node costs a tenth of a pass: one that brings 0.5 tokens pays, one that brings 0.05 not."""
    assert 0.9 < nodes_drafted(Bench(cost={1: 1.0, 64: 7.3}), (0.5, 0.05, 0.04)) <= 1.0


def test_a_later_node_may_pay_for_a_step_in_the_curve() -> None:
    """Up to eight nodes cost the same: if it pays at all, all of them are taken."""
    stairs = {1: 1.0, 2: 1.5, 8: 1.5, 9: 3.0}
    assert nodes_drafted(Bench(cost=stairs), (0.9, 0.8, 0.7, 0.6, 0.5)) > 4
    assert nodes_drafted(Bench(cost=stairs), (0.3, 0.1)) == 0


def test_under_load_drafts_shrink() -> None:
    """A curve that is flat up to eight nodes and then steep: alone it pays, in a batch it does not."""
    cost = {1: 1.0, 8: 1.0, 9: 2.0, 64: 57.0}
    assert nodes_drafted(Bench(cost=cost), (0.5, 0.4, 0.3)) > 2
    assert nodes_drafted(Bench(cost=cost, pages=400), (0.5, 0.4, 0.3), others=11) < 0.7
