"""The cost curve, and the plan that weighs nodes by it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from outstride import registry
from outstride.cache.pool import PagePool
from outstride.core.contracts import Demand, Drafter, Guessing, Pending, Work
from outstride.core.guess import Guess, Sign
from outstride.core.params import SamplingParams
from outstride.core.proposal import TARGET, Proposal, Scores, Verdict
from outstride.core.sequence import View
from outstride.engine.cost import Cost, Drafts
from outstride.engine.engine import Engine
from outstride.engine.measuring import KNOTS, measure
from outstride.models.toy import Toy
from tests.conformance.harness import Bench, alone, some_prompts, toy_method


def test_the_curve_is_straight_between_knots_and_goes_on() -> None:
    curve = Cost({1: 1.0, 2: 2.0, 4: 3.0}).curve(6)
    assert curve[1:] == pytest.approx([1.0, 2.0, 2.5, 3.0, 3.5, 4.0])


def test_more_nodes_never_cost_less() -> None:
    assert Cost({1: 2.0, 2: 1.0, 4: 3.0}).curve(4)[1:] == pytest.approx([1.5, 1.5, 2.25, 3.0])


def test_a_knot_below_its_neighbours_does_not_sink() -> None:
    """Eight nodes cost what four cost: whatever the curve said before, it ends up saying so."""
    cost = Cost({1: 1.0, 4: 2.0, 8: 1.0, 64: 8.0})
    for _ in range(1000):
        cost.observe(4, 1.5)
        cost.observe(8, 1.5)
        cost.observe(1, 1.0)
    assert cost.knots[1] == pytest.approx(1.0, rel=0.15)
    assert cost.knots[4] == pytest.approx(1.5, rel=0.15)
    assert cost.knots[8] == pytest.approx(1.5, rel=0.15)


@pytest.mark.parametrize("knots", [{}, {0: 1.0}, {1: 0.0}])
def test_a_curve_needs_sense(knots: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="needs positive seconds"):
        Cost(knots)


def test_what_becomes_slower_is_believed_near_what_was_seen() -> None:
    """Passes over eight nodes tell something of those over four and little of those over one."""
    cost = Cost({1: 1.0, 4: 1.5, 8: 2.0, 64: 4.0})
    for _ in range(60):
        cost.observe(8, 3.0)
    assert cost.knots[8] == pytest.approx(3.0, rel=0.02)
    assert 1.7 < cost.knots[4] < 2.1
    assert 1.0 < cost.knots[1] < 1.15
    assert 4.0 < cost.knots[64] < 4.6
    for _ in range(60):
        cost.observe(1, 1.5)
    assert cost.knots[1] == pytest.approx(1.5, rel=0.02)


def test_a_knot_that_lies_wrong_is_put_right() -> None:
    """Steps of both sizes say what each costs; the curve ends up between them."""
    cost = Cost({1: 1.0, 8: 1.0, 64: 8.0})
    for _ in range(400):
        cost.observe(1, 1.0)
        cost.observe(8, 2.0)
    assert cost.knots[8] / cost.knots[1] == pytest.approx(2.0, rel=0.15)


def test_one_interruption_changes_little() -> None:
    cost = Cost({1: 1.0, 8: 2.0})
    cost.observe(1, 500.0)
    assert cost.knots[1] < 1.3


def test_a_frozen_curve_stays() -> None:
    cost = Cost({1: 1.0, 8: 2.0}, frozen=True)
    cost.observe(1, 5.0)
    assert cost.knots == {1: 1.0, 8: 2.0}


def test_what_drafting_takes_is_learnt_apart() -> None:
    cost = Cost({1: 1.0, 8: 2.0})
    assert cost.drafting(1, Drafts.LOOKED) < cost.drafting(1, Drafts.ASKED) < 1.0
    for _ in range(60):
        cost.observe_drafting(1, 0.6, Drafts.ASKED)
        cost.observe_drafting(3, 0.34, Drafts.LOOKED)
    assert cost.drafting(1, Drafts.ASKED) == pytest.approx(0.6, rel=0.01)
    assert cost.drafting(3, Drafts.LOOKED) == pytest.approx(0.34, rel=0.01)
    assert cost.knots == {1: 1.0, 8: 2.0}
    frozen = Cost({1: 1.0}, frozen=True)
    frozen.observe_drafting(1, 9.0, Drafts.ASKED)
    assert frozen.drafting(1, Drafts.ASKED) < 1.0


def test_a_slow_spell_has_not_the_last_word() -> None:
    """A part that is not asked because it was slow for a while would never be asked again."""
    cost = Cost({1: 1.0, 8: 2.0})
    for seconds in [0.1] * 100 + [0.9] * 20:
        cost.observe_drafting(1, seconds, Drafts.ASKED)
    assert cost.drafting(1, Drafts.ASKED) == pytest.approx(0.9)
    for _ in range(128):
        cost.rest()
    assert cost.drafting(1, Drafts.ASKED) == pytest.approx(0.1)


class Dawdling(Drafter):
    """Takes its time, and its guesses are wrong."""

    def __init__(self, *, weighed: bool) -> None:
        self.weighed = weighed

    def demand(self, view: View) -> Demand:
        return Demand(most=2, gain=0.1) if view.pending() == 1 else Demand()

    def guess(self, view: View, room: int) -> Guessing:
        yield from ()
        time.sleep(0.02)
        guess = Guess()
        guess.add_run([1] * min(room, view.limit - view.end - 1), Sign("slow"), 0.1)
        return guess


@pytest.mark.parametrize("weighed", [True, False])
def test_a_slow_drafter_does_not_make_passes_look_dear(weighed: bool) -> None:
    """Else a plain step would look dear, too, and drafting cheap beside it.

    Nor does one that is not weighed make drafts look dear for those that are.
    """
    bench = Bench()
    bench.engine.scheduler.cost = cost = Cost({1: 0.001, 64: 0.002})
    method = toy_method(Dawdling(weighed=weighed), registry.build("plain").acceptor)
    bench.run(some_prompts(5, 1), method, SamplingParams(max_tokens=34, ignore_eos=True))
    assert (cost.drafting(1, Drafts.LOOKED) > 0.008) == weighed
    assert cost.knots[1] < 0.01


class Sleepy(Drafter):
    """Rests for three steps, then looks on for one."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.told: list[int] = []

    def demand(self, view: View) -> Demand:
        self.asked.append(view.steps)
        return Demand(rest=3 if len(self.asked) % 2 else 0)

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> None:
        self.told.append(view.steps)


def test_who_rests_is_neither_asked_nor_told() -> None:
    """A step counts as one whatever the others do; the first is the one in which it said so."""
    drafter = Sleepy()
    method = toy_method(drafter, registry.build("plain").acceptor)
    bench = Bench()
    bench.run(some_prompts(5, 1), method, SamplingParams(max_tokens=14, ignore_eos=True))
    talking = [step for step in drafter.asked if step]
    assert drafter.asked[0] == 0
    assert talking == [3, 4, 7, 8, 11, 12]
    assert drafter.told == [4, 8, 12]


@pytest.mark.parametrize(
    ("name", "seen"), [("plain", True), ("early-exit:layer=1,length=1", False)]
)
def test_passes_over_some_layers_say_nothing_of_whole_ones(name: str, seen: bool) -> None:
    bench = Bench()
    bench.engine.scheduler.cost = cost = Cost({1: 50.0, 64: 60.0})
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    bench.run([[5]], registry.build(name), params)
    assert (cost.knots[1] < 20.0) == seen


def test_measuring_leaves_no_trace() -> None:
    toy = Toy(pages=80)
    pool = PagePool(toy.pages, toy.page_size)
    cost = measure(toy, pool, 64)
    assert cost is not None
    assert set(cost.knots) == set(KNOTS)
    assert pool.available == 80
    pool.check_integrity([])


def test_costs_can_be_measured_before_the_first_request() -> None:
    engine, known = Engine({TARGET: Toy(pages=80)}), list[Cost | None]()
    for name in ("plain", "auto:from=none"):
        engine.roster.prepare(registry.build(name))
        known.append(engine.scheduler.cost)
    assert known[0] is None  # plain does not want to know
    assert known[1] is not None
    engine.submit([5], SamplingParams(max_tokens=2), registry.build("auto:from=none"))
    assert engine.scheduler.cost is known[1]


class Even(Toy):
    """Takes as long for many nodes as for one; as on a card, the first two of a kind take longer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._seen = Counter[tuple[int, int]]()

    def forward(self, work: Sequence[Work]) -> Pending:
        started = super().forward(work)
        started.wait()
        proposal = work[0].proposal
        kind = len(proposal.graph), proposal.given
        self._seen[kind] += 1
        end = time.perf_counter() + (0.01 if self._seen[kind] > 2 else 0.06)
        while time.perf_counter() < end:
            pass
        return started


def test_where_nodes_cost_nothing_prompts_are_read_at_once() -> None:
    """And what a step took that read some is no news of what nodes cost."""
    toy = Even(pages=80)
    cost = measure(toy, PagePool(toy.pages, toy.page_size), 256)
    assert cost is not None
    assert cost.reading.flat
    before = cost.reading.node
    cost.observe(20, 0.06, [(16, 0)], [(1, 50), (1, 60)])
    assert cost.reading.node == before
    assert cost.reading.fits(0.02, 50) > 500


def test_without_room_nothing_is_measured() -> None:
    toy = Toy(pages=4)
    assert measure(toy, PagePool(toy.pages, toy.page_size), 64) is None


class Offering(Drafter):
    """Offers nodes with given gains, whatever they are."""

    weighed = True

    def __init__(self, gains: tuple[float, ...]) -> None:
        self._gains = gains

    def demand(self, view: View) -> Demand:
        return Demand(gains=self._gains) if view.pending() == 1 else Demand()

    def guess(self, view: View, room: int) -> Guessing:
        yield from ()
        guess = Guess()
        guess.add_run([1] * min(room, view.limit - view.end - 1), Sign("offer"), 0.5)
        return guess


def nodes_drafted(bench: Bench, gains: tuple[float, ...], company: int = 0) -> float:
    """Nodes per pass that a sequence was granted, on average."""
    acceptor = registry.build("plain").acceptor
    method = toy_method(Offering(gains), acceptor)
    params = SamplingParams(max_tokens=30, ignore_eos=True, seed=1)
    prompts = some_prompts(3, 1 + company)
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
    """A curve that is flat up to eight nodes and then steep: alone it pays, in company it does not."""
    cost = {1: 1.0, 8: 1.0, 9: 2.0, 64: 57.0}
    assert nodes_drafted(Bench(cost=cost), (0.5, 0.4, 0.3)) > 2
    assert nodes_drafted(Bench(cost=cost, pages=400), (0.5, 0.4, 0.3), company=11) < 0.7
