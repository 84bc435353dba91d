"""How much the prefill of a long prompt slows decoding requests down, by a simulated clock.

The time of a pass follows from its nodes, the KV that they attend to and the KV that is loaded. The
engine knows of it only what it measures.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from types import SimpleNamespace

import numpy as np
import pytest

from outstride import SamplingParams, registry
from outstride.core.contracts import CompletedPass, PassInput, PendingPass
from outstride.core.proposal import TARGET, Scores
from outstride.engine import engine as engine_module
from outstride.engine import prefill_chunking as chunking_module
from outstride.engine.engine import Engine
from outstride.engine.prefill_chunking import (
    MAX_SLOWDOWN,
    MIN_CHUNK,
    SLOWDOWN,
    PrefillingRequest,
    draft_budget,
    needed_slowdown,
)
from outstride.models.toy import Toy
from outstride.policy import profiling
from outstride.policy.config import DEFAULT_CONFIG, AutoConfig
from outstride.policy.cost_model import CostModel, PrefillCost, whole_tiles
from outstride.policy.policy import DraftPolicy

registry.discover()
PLAIN = registry.build("plain")


@dataclass
class Timed:
    """A model whose passes take simulated seconds; every token that it samples is the same."""

    node: float = 0.4
    look: float = 0.0006
    fetch: float = 0.003
    jitter: float = 0.0
    slow: tuple[float, float] = (0.0, 0.0)
    """The interval in which everything takes twice as long."""
    toy: Toy = field(default_factory=lambda: Toy(context=4096, pages=2048))
    now: float = 0.0
    random: random.Random = field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        self.toy.forward = self.forward  # type: ignore[method-assign]

    def forward(self, work: Sequence[PassInput]) -> PendingPass:
        noise = 1.0 + self.jitter * self.random.random()
        noise *= 2.0 if self.slow[0] <= self.now < self.slow[1] else 1.0
        self.now += noise * self._seconds(work)
        nodes = [item.proposal.wanted for item in work]
        return CompletedPass([Scores(some, np.full((len(some), 1), 7)) for some in nodes])

    def _seconds(self, work: Sequence[PassInput]) -> float:
        seconds = 6.0
        for item in work:
            nodes, cached = len(item.proposal.graph), len(item.table)
            seconds += self.node * nodes + self.look * nodes * (cached + nodes / 2)
            seconds += self.fetch * cached
        return seconds


def slowdowns(
    timed: Timed,
    patch: pytest.MonkeyPatch,
    length: int = 3000,
    config: AutoConfig = DEFAULT_CONFIG,
    *,
    measured: bool = True,
) -> list[float]:
    """The time of each step that prefills a prompt while 8 requests decode, over the baseline.

    The baseline is the median of the steps just before the prompt arrived.
    measured: whether the cost of chunks was measured before, as on GPUs; otherwise a prior counts.
    """
    clock = SimpleNamespace(perf_counter=lambda: timed.now)
    patch.setattr(profiling, "time", clock)
    patch.setattr(engine_module, "time", clock)
    engine = Engine({TARGET: timed.toy}, policy=DraftPolicy(config=config))
    if measured:
        pool = engine.pool()
        engine.cost = profiling.measure(timed.toy, pool, 256, long_prefill=True, config=config)
    engine.warm_up()
    params = SamplingParams(max_tokens=1500, ignore_eos=True)
    decoding = [engine.submit([5, 6, i], params, PLAIN) for i in range(8)]

    def step() -> float:
        before = timed.now
        engine.step()
        return timed.now - before

    usual = median([step() for _ in range(40)][10:])
    prompt = [1 + i % 20 for i in range(length)]
    long = engine.submit(prompt, SamplingParams(max_tokens=1), PLAIN)
    found = []
    while not long.output:
        found.append(step() / usual)
    steps = engine.steps
    assert all(len(sequence.output) == steps for sequence in decoding)  # none missed a pass
    return found


@pytest.mark.parametrize("jitter", [0.0, 0.15])
def test_no_pass_takes_more_than_three_times_the_baseline(
    monkeypatch: pytest.MonkeyPatch, jitter: float
) -> None:
    found = slowdowns(Timed(look=0.0003, fetch=0.001, jitter=jitter), monkeypatch)
    assert max(found) <= 3
    assert sorted(found)[int(0.95 * len(found))] <= 2.7
    assert sum(found) / len(found) > 0.9 * SLOWDOWN  # and the slack is used


@pytest.mark.parametrize(
    "timed",
    [
        Timed(),
        Timed(look=0.0, fetch=0.0),
        Timed(node=0.1, look=0.0001, fetch=0.001, jitter=0.15),
        Timed(node=1.5, look=0.001, fetch=0.001),
    ],
    ids=["attention", "nodes", "fast", "slow"],
)
def test_the_first_prompt_of_a_machine_has_only_a_prior(
    monkeypatch: pytest.MonkeyPatch, timed: Timed
) -> None:
    """Nothing was measured: the cost of chunks is learned while the prompt is prefilled."""
    found = slowdowns(timed, monkeypatch, length=1500, measured=False)
    assert max(found) <= 3
    assert sum(found) / len(found) > 0.8 * SLOWDOWN  # and the slack is used


def test_no_other_slowdown_has_a_shorter_longest_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is expensive here: no rule prefills 3,000 tokens within three times the baseline."""
    found = slowdowns(Timed(), monkeypatch)
    others = {}
    for slowdown in (2.4, 3.0, 3.4, 3.8):
        monkeypatch.setattr(chunking_module, "SLOWDOWN", slowdown)
        monkeypatch.setattr(chunking_module, "MAX_SLOWDOWN", slowdown)
        others[slowdown] = slowdowns(Timed(), monkeypatch)
    assert max(found) < 1.05 * min(map(max, others.values()))
    assert max(found) < 0.9 * max(others[2.4])
    assert len(found) < 0.6 * len(others[2.4])  # and the prefill ends sooner


def test_a_short_prompt_needs_the_usual_slowdown_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert max(slowdowns(Timed(), monkeypatch, length=500)) <= 1.05 * SLOWDOWN


def test_the_needed_slowdown_grows_with_the_prompt() -> None:
    reading = PrefillCost(0.4, 0.0006, 0.003)
    needed = [
        needed_slowdown(reading, PrefillingRequest(1, 0, size), 10.0, 10.0, 0.03)
        for size in (100, 2000, 3000)
    ]
    assert needed[0] == SLOWDOWN < needed[1] < needed[2] < MAX_SLOWDOWN
    assert (
        needed_slowdown(reading, PrefillingRequest(1, 0, 100_000), 10.0, 10.0, 0.03) == MAX_SLOWDOWN
    )
    # decoding requests that have grown leave less slack
    assert needed_slowdown(reading, PrefillingRequest(1, 2000, 1000), 10.0, 15.0, 0.03) > needed[1]


def test_a_slow_machine_does_not_raise_the_slowdown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calm = Timed(look=0.0002, fetch=0.0005)
    usual = max(slowdowns(calm, monkeypatch))

    def late(config: AutoConfig = DEFAULT_CONFIG) -> float:
        slow = Timed(look=0.0002, fetch=0.0005, slow=(0.4 * calm.now, 0.8 * calm.now))
        return median(
            ratio for ratio in slowdowns(slow, monkeypatch, config=config) if ratio > 1.05 * usual
        )

    believing = AutoConfig(prefill_undisturbed_growth=2.0)  # the current cost counts as lasting
    assert usual < late() < 0.95 * late(believing)


def test_a_lasting_change_of_cost_is_learnt() -> None:
    reading = PrefillCost(0.4, 0.0006, 0.003)
    for _ in range(20):
        reading.observe([(20, 0)], 16.0)
    assert reading.per_node > 0.7
    assert reading.undisturbed.per_node < 0.42
    for _ in range(2000):
        reading.observe([(20, 0)], 16.0)
    assert reading.undisturbed.per_node == pytest.approx(reading.per_node)
    reading.observe([(20, 0)], 8.0)
    assert reading.undisturbed.per_node == reading.per_node < 0.8


def test_drafts_shrink_during_a_prefill() -> None:
    cost, eight = CostModel({1: 6.0, 65: 38.0}), [(1, 128)] * 8
    for _ in range(40):
        cost.observe(24, 17.5, (), [(3, 128)] * 8)
    reading = [(20, 500)]
    budget = draft_budget(cost, reading, eight, 200)
    curve = cost.curve(256)
    spent = cost.decode_seconds(eight) + cost.prefill.seconds(*reading[0]) - curve[8]
    assert 0 < budget < 200
    assert spent + curve[8 + budget] <= SLOWDOWN * cost.usual_step < spent + curve[9 + budget]
    assert draft_budget(cost, [(200, 3000)], eight, 200) == 0
    assert draft_budget(cost, reading, eight, 3) == 3


def test_chunks_stay_large_where_cost_does_not_grow_with_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = slowdowns(Timed(look=0.0, fetch=0.0), monkeypatch)
    assert max(found) <= 1.05 * SLOWDOWN
    assert len(found) < 200  # of 3,000 tokens


def test_cost_that_the_profile_missed_is_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a batch, chunks cost three times what the profile of lone chunks says."""

    def expensive() -> list[float]:
        timed = Timed(look=0.0002, fetch=0.001)
        plain = timed.forward

        def forward(work: Sequence[PassInput]) -> PendingPass:
            if len(work) > 1:
                timed.now += 0.8 * sum(max(len(item.proposal.graph) - 1, 0) for item in work)
            return plain(work)

        timed.toy.forward = forward  # type: ignore[method-assign]
        return slowdowns(timed, monkeypatch, length=1200)

    learnt = expensive()
    monkeypatch.setattr(PrefillCost, "observe", lambda *_: None)
    blind = expensive()
    late = 1.25 * SLOWDOWN
    assert sum(ratio > late for ratio in learnt) <= 0.05 * len(learnt)
    assert sum(ratio > late for ratio in blind) > 0.5 * len(blind)


def test_a_prompt_beyond_any_slowdown_is_prefilled_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(slowdowns(Timed(fetch=0.5), monkeypatch, length=400)) <= 400 / MIN_CHUNK + 1


def test_the_largest_chunk_that_fits() -> None:
    reading = PrefillCost(0.4, 0.0006, 0.003)
    for cached in (0, 100, 3000):
        for seconds in (1.0, 12.0, 50.0):
            size = reading.max_nodes(seconds, cached)
            assert size == 0 or reading.seconds(size, cached) <= seconds
            assert reading.seconds(size + 1, cached) > seconds


def test_no_tile_is_started_for_a_few_nodes() -> None:
    assert [whole_tiles(8, budget) for budget in (0, 4, 8, 9, 10, 11, 23, 24, 30, 33)] == [
        *(0, 4, 8, 8, 8, 11, 23, 24, 24, 33)
    ]
    for beside in range(1, 40):
        for budget in range(60):
            found = whole_tiles(beside, budget)
            assert DEFAULT_CONFIG.min_tile_share * budget <= found <= budget
            assert found == budget or (beside + found) % DEFAULT_CONFIG.tile_rows == 0


@pytest.mark.parametrize("unit", [1.0, 1e-7])
def test_corrections_go_to_the_terms_of_the_time(unit: float) -> None:
    reading = PrefillCost(0.4 * unit, 0.0006 * unit, 0.003 * unit)
    for _ in range(100):
        reading.observe([(20, 0)], 16.0 * unit)  # without cached tokens, nodes cost twice as much
    assert reading.per_node == pytest.approx(0.8 * unit, rel=0.02)
    assert reading.per_cached == 0.003 * unit
    assert reading.per_pair < 0.00065 * unit


def test_chunks_do_not_change_the_cost_curve() -> None:
    cost = CostModel({1: 1.0, 64: 7.3})
    for _ in range(50):
        cost.observe(28, 60.0, [(20, 3000)], [(1, 128)] * 8)
    assert cost.knots == {1: 1.0, 64: 7.3}
    assert cost.prefill.seconds(20, 3000) == pytest.approx(60.0 - cost.curve(8)[8], rel=0.05)


def test_a_few_slow_steps_do_not_raise_the_baseline() -> None:
    """Another process slowed the last steps before a prompt arrived: they are no baseline."""
    cost, eight = CostModel({1: 8.0, 8: 9.0, 64: 20.0}), [(1, 128)] * 8
    for _ in range(60):
        cost.observe(8, 10.0, (), eight)
    assert cost.decode_seconds(eight) == pytest.approx(10.0, rel=0.02)
    for _ in range(10):
        cost.observe(8, 20.0, (), eight)
    assert cost.curve(8)[8] > 14.0
    assert cost.decode_seconds(eight) < 12.0
