"""How long those who talk wait while somebody's long prompt is read, by a clock that is simulated.

A pass takes as long as its nodes, the entries that they look at and the entries that have to be
fetched say it does; the engine knows nothing of that but what it measures.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from types import SimpleNamespace

import pytest

from outstride import SamplingParams, registry
from outstride.core.contracts import Pending, Work
from outstride.core.proposal import TARGET
from outstride.engine import engine as engine_module
from outstride.engine import measuring
from outstride.engine import pieces as pieces_module
from outstride.engine.cost import FULL, TILE, Cost, Reading, evened
from outstride.engine.engine import Engine
from outstride.engine.pieces import MOST, PATIENCE, PROGRESS, Reader, foreseen, spare
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
    slow: tuple[float, float] = (0.0, 0.0)
    """From when to when everything takes twice as long."""
    toy: Toy = field(default_factory=lambda: Toy(context=4096, pages=2048))
    now: float = 0.0
    random: random.Random = field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        self._forward = self.toy.forward
        self.toy.forward = self.forward  # type: ignore[method-assign]

    def forward(self, work: Sequence[Work]) -> Pending:
        noise = 1.0 + self.jitter * self.random.random()
        noise *= 2.0 if self.slow[0] <= self.now < self.slow[1] else 1.0
        self.now += noise * self._seconds(work)
        return self._forward(work)

    def _seconds(self, work: Sequence[Work]) -> float:
        seconds = 6.0
        for item in work:
            nodes, cached = len(item.proposal.graph), len(item.table)
            seconds += self.node * nodes + self.look * nodes * (cached + nodes / 2)
            seconds += self.fetch * cached
        return seconds


def waits(timed: Timed, patch: pytest.MonkeyPatch, length: int = 3000) -> list[float]:
    """How many times as long as usual steps take in which a prompt is read while 8 talk.

    What is usual is the median of the steps just before it came.
    """
    clock = SimpleNamespace(perf_counter=lambda: timed.now)
    patch.setattr(measuring, "time", clock)
    patch.setattr(engine_module, "time", clock)
    engine = Engine({TARGET: timed.toy})
    engine.scheduler.cost = measuring.measure(
        timed.toy, engine.passes.pools[TARGET], 256, reading=True
    )
    params = SamplingParams(max_tokens=1500, ignore_eos=True)
    talking = [engine.submit([5, 6, i], params, PLAIN) for i in range(8)]

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
    steps = engine.ledger.steps
    assert all(len(sequence.output) == steps for sequence in talking)  # nobody missed a pass
    return found


@pytest.mark.parametrize("jitter", [0.0, 0.15])
def test_nobody_waits_three_times_as_long_as_usual(
    monkeypatch: pytest.MonkeyPatch, jitter: float
) -> None:
    found = waits(Timed(look=0.0003, fetch=0.001, jitter=jitter), monkeypatch)
    assert max(found) <= 3
    assert sorted(found)[int(0.95 * len(found))] <= 2.7
    assert sum(found) / len(found) > 0.9 * PATIENCE  # and what there is of time is used


def test_no_other_patience_makes_the_longest_wait_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is dear here: in three times the usual, no rule reads 3,000 tokens to their end."""
    found = waits(Timed(), monkeypatch)
    others = {}
    for patience in (2.4, 3.0, 3.4, 3.8):
        monkeypatch.setattr(pieces_module, "PATIENCE", patience)
        monkeypatch.setattr(pieces_module, "MOST", patience)
        others[patience] = waits(Timed(), monkeypatch)
    assert max(found) < 1.05 * min(map(max, others.values()))
    assert max(found) < 0.9 * max(others[2.4])
    assert len(found) < 0.6 * len(others[2.4])  # and the prompt is read sooner


def test_a_short_prompt_asks_for_no_more_patience_than_usual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert max(waits(Timed(), monkeypatch, length=500)) <= 1.05 * PATIENCE


def test_patience_is_what_it_takes() -> None:
    reading = Reading(0.4, 0.0006, 0.003)
    needed = [foreseen(reading, Reader(1, 0, size), 10.0, 10.0, 0.03) for size in (100, 2000, 3000)]
    assert needed[0] == PATIENCE < needed[1] < needed[2] < MOST
    assert foreseen(reading, Reader(1, 0, 100_000), 10.0, 10.0, 0.03) == MOST
    # those who have grown leave less of what was usual
    assert foreseen(reading, Reader(1, 2000, 1000), 10.0, 15.0, 0.03) > needed[1]


def test_nobody_is_more_patient_because_the_machine_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calm = Timed(look=0.0002, fetch=0.0005)
    usual = max(waits(calm, monkeypatch))

    def late() -> float:
        slow = Timed(look=0.0002, fetch=0.0005, slow=(0.4 * calm.now, 0.8 * calm.now))
        return median(ratio for ratio in waits(slow, monkeypatch) if ratio > 1.05 * usual)

    found = late()
    monkeypatch.setattr(Reading, "LASTING", 2.0)  # what is dear now is dear for ever
    assert usual < found < 0.95 * late()


def test_what_stays_dear_counts_in_the_end() -> None:
    reading = Reading(0.4, 0.0006, 0.003)
    for _ in range(20):
        reading.observe([(20, 0)], 16.0)
    assert reading.node > 0.7
    assert reading.calm.node < 0.42
    for _ in range(2000):
        reading.observe([(20, 0)], 16.0)
    assert reading.calm.node == pytest.approx(reading.node)
    reading.observe([(20, 0)], 8.0)
    assert reading.calm.node == reading.node < 0.8


def test_drafts_shrink_while_somebody_reads() -> None:
    cost, eight = Cost({1: 6.0, 65: 38.0}), [(1, 128)] * 8
    for _ in range(40):
        cost.observe(24, 17.5, (), [(3, 128)] * 8)
    reading = [(20, 500)]
    room = spare(cost, reading, eight, 200)
    curve = cost.curve(256)
    spent = cost.talking(eight) + cost.reading.seconds(*reading[0]) - curve[8]
    assert 0 < room < 200
    assert spent + curve[8 + room] <= PATIENCE * cost.usual < spent + curve[9 + room]
    assert spare(cost, [(200, 3000)], eight, 200) == 0
    assert spare(cost, reading, eight, 3) == 3


def test_where_reading_costs_only_by_the_node_pieces_stay_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = waits(Timed(look=0.0, fetch=0.0), monkeypatch)
    assert max(found) <= 1.05 * PATIENCE
    assert len(found) < 200  # of 3,000 tokens


def test_what_was_not_foreseen_is_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside others, pieces are three times as dear as they were where it was measured: alone."""

    def dear() -> list[float]:
        timed = Timed(look=0.0002, fetch=0.001)
        plain = timed.forward

        def forward(work: Sequence[Work]) -> Pending:
            if len(work) > 1:
                timed.now += 0.8 * sum(max(len(item.proposal.graph) - 1, 0) for item in work)
            return plain(work)

        timed.toy.forward = forward  # type: ignore[method-assign]
        return waits(timed, monkeypatch, length=1200)

    learnt = dear()
    monkeypatch.setattr(Reading, "observe", lambda *_: None)
    blind = dear()
    late = 1.25 * PATIENCE
    assert sum(ratio > late for ratio in learnt) <= 0.05 * len(learnt)
    assert sum(ratio > late for ratio in blind) > 0.5 * len(blind)


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
    assert [evened(8, most) for most in (0, 4, 8, 9, 10, 11, 23, 24, 30, 33)] == [
        *(0, 4, 8, 8, 8, 11, 23, 24, 24, 33)
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
    cost, eight = Cost({1: 8.0, 8: 9.0, 64: 20.0}), [(1, 128)] * 8
    for _ in range(60):
        cost.observe(8, 10.0, (), eight)
    assert cost.talking(eight) == pytest.approx(10.0, rel=0.02)
    for _ in range(5):
        cost.observe(8, 20.0, (), eight)
    assert cost.curve(8)[8] > 14.0
    assert cost.talking(eight) < 12.0
