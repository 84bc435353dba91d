"""How long those who talk wait while somebody's long prompt is read, by a clock that is simulated.

A pass takes as long as its nodes, the entries that they look at and the entries that have to be
fetched say it does; the engine knows nothing of that but what it measures.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from outstride import SamplingParams, registry
from outstride.core.contracts import Pending, Work
from outstride.core.proposal import TARGET
from outstride.engine import cost as cost_module
from outstride.engine import engine as engine_module
from outstride.engine.cost import FULL, TILE, Cost, Reading, evened, measure
from outstride.engine.engine import Engine
from outstride.engine.scheduler import PATIENCE, PROGRESS
from outstride.models.toy import Toy

registry.discover()
PLAIN = registry.build("plain")


@dataclass
class Timed:
    """A toy whose passes take simulated seconds."""

    node: float = 0.4
    look: float = 0.0006
    fetch: float = 0.003
    jitter: float = 0.0
    toy: Toy = field(default_factory=lambda: Toy(context=4096, pages=2048))
    now: float = 0.0
    alone: float = 0.0
    """What the last pass would have taken without the prompt."""
    random: random.Random = field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        self._forward = self.toy.forward
        self.toy.forward = self.forward  # type: ignore[method-assign]

    def forward(self, work: Sequence[Work]) -> Pending:
        noise = 1.0 + self.jitter * self.random.random()
        self.now += noise * self._seconds(work)
        self.alone = noise * self._seconds([item for item in work if len(item.proposal.graph) == 1])
        return self._forward(work)

    def _seconds(self, work: Sequence[Work]) -> float:
        seconds = 6.0
        for item in work:
            nodes, cached = len(item.proposal.graph), len(item.table)
            seconds += self.node * nodes + self.look * nodes * (cached + nodes / 2)
            seconds += self.fetch * cached
        return seconds


def waits(timed: Timed, patch: pytest.MonkeyPatch, length: int = 3000) -> list[float]:
    """How many times as long as without it steps take in which a prompt is read while 8 talk."""
    clock = SimpleNamespace(perf_counter=lambda: timed.now)
    patch.setattr(cost_module, "time", clock)
    patch.setattr(engine_module, "time", clock)
    engine = Engine({TARGET: timed.toy})
    engine.scheduler.cost = measure(timed.toy, engine.passes.pools[TARGET], 256, reading=True)
    params = SamplingParams(max_tokens=900, ignore_eos=True)
    talking = [engine.submit([5, 6, i], params, PLAIN) for i in range(8)]
    for _ in range(40):
        engine.step()
    prompt = [1 + i % 20 for i in range(length)]
    long = engine.submit(prompt, SamplingParams(max_tokens=1), PLAIN)
    found = []
    while not long.output:
        before = timed.now
        engine.step()
        found.append((timed.now - before) / timed.alone)
    steps = engine.ledger.steps
    assert all(len(sequence.output) == steps for sequence in talking)  # nobody missed a pass
    return found


@pytest.mark.parametrize("jitter", [0.0, 0.15])
def test_nobody_waits_three_times_as_long_as_usual(
    monkeypatch: pytest.MonkeyPatch, jitter: float
) -> None:
    found = waits(Timed(jitter=jitter), monkeypatch)
    assert max(found) <= 3
    assert sorted(found)[int(0.95 * len(found))] <= 2
    assert sum(found) / len(found) > 0.9 * PATIENCE  # and what there is of time is used


def test_where_reading_costs_only_by_the_node_pieces_stay_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = waits(Timed(look=0.0, fetch=0.0), monkeypatch)
    assert max(found) <= 3
    assert len(found) < 200  # of 3,000 tokens


def test_what_was_not_foreseen_is_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind many entries passes are three times as slow as where it was measured: caches end."""
    timed = Timed()
    plain = timed.forward

    def steep(work: Sequence[Work]) -> Pending:
        deep = sum(max(len(item.table) - 2200, 0) for item in work)
        timed.now += 0.009 * deep
        return plain(work)

    timed.toy.forward = steep  # type: ignore[method-assign]
    late = [ratio > 3 for ratio in waits(timed, monkeypatch)]
    assert sum(late) <= 0.05 * len(late)


def test_a_prompt_that_cannot_be_read_in_time_is_read_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(waits(Timed(fetch=0.5), monkeypatch, length=400)) <= 400 / PROGRESS + 1


def test_the_largest_piece_that_fits() -> None:
    reading = Reading(0.4, 0.0006, 0.003)
    for cached in (0, 100, 3000):
        for seconds in (1.0, 12.0, 50.0):
            size = reading.fits(seconds, cached)
            assert size == 0 or reading.seconds(size, cached) <= seconds
            assert reading.seconds(size + 1, cached) > seconds


def test_no_tile_is_begun_for_a_few_nodes() -> None:
    assert [evened(8, most) for most in (0, 4, 8, 9, 13, 14, 23, 24, 30)] == [
        *(0, 4, 8, 8, 8, 14, 23, 24, 24)
    ]
    for beside in range(1, 40):
        for most in range(60):
            found = evened(beside, most)
            assert FULL * most <= found <= most
            assert found == most or (beside + found) % TILE == 0


@pytest.mark.parametrize("unit", [1.0, 1e-7])
def test_corrections_go_to_what_made_up_the_time(unit: float) -> None:
    reading = Reading(0.4 * unit, 0.0006 * unit, 0.003 * unit)
    for _ in range(100):
        reading.observe([(20, 0)], 16.0 * unit)  # behind nothing, nodes cost twice as much
    assert reading.node == pytest.approx(0.8 * unit, rel=0.02)
    assert reading.fetch == 0.003 * unit
    assert reading.look < 0.00065 * unit


def test_pieces_leave_the_curve_as_it_is() -> None:
    cost = Cost({1: 1.0, 64: 7.3})
    for _ in range(50):
        cost.observe(28, 60.0, [(20, 3000)], [(1, 128)] * 8)
    assert cost.knots == {1: 1.0, 64: 7.3}
    assert cost.reading.seconds(20, 3000) == pytest.approx(60.0 - cost.curve(8)[8], rel=0.05)


def test_a_few_slow_steps_do_not_make_the_others_wait_longer() -> None:
    """Something else held up the last steps before a prompt came: that is not what is usual."""
    cost, eight = Cost({1: 8.0, 64: 20.0}), [(1, 128)] * 8
    for _ in range(60):
        cost.observe(8, 10.0, (), eight)
    assert cost.talking(eight) == pytest.approx(10.0, rel=0.02)
    for _ in range(5):
        cost.observe(8, 20.0, (), eight)
    assert cost.curve(8)[8] > 14.0
    assert cost.talking(eight) < 12.0
