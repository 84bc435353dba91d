"""Who is served first, and how long the others wait for somebody's prompt."""

from __future__ import annotations

from outstride import SamplingParams, registry
from outstride.core.sequence import Sequence
from outstride.engine.cost import Cost
from outstride.engine.engine import Engine
from outstride.engine.pieces import PATIENCE, PROGRESS
from outstride.engine.scheduler import Limits
from outstride.models.toy import Toy

registry.discover()
PLAIN = registry.build("plain")


def finished(engine: Engine) -> list[Sequence]:
    """Sequences in the order in which they end."""
    order: list[Sequence] = []
    while engine.busy:
        engine.step(lambda news: order.extend(p.sequence for p in news if p.finished))
        engine.check_integrity()
    return order


def test_the_lower_priority_goes_first_and_age_decides_among_equals() -> None:
    engine = Engine({"target": Toy()}, limits=Limits(sequences=1))
    params = SamplingParams(max_tokens=5)
    wanted = [3, 0, -2, 0, 3, -2]
    found = [engine.submit([5, 6, i], params, PLAIN, priority=p) for i, p in enumerate(wanted)]
    expected = [found[i] for i in (2, 5, 1, 3, 0, 4)]
    assert finished(engine) == expected


def test_the_lowest_is_preempted_and_says_the_same() -> None:
    params = SamplingParams(max_tokens=40)
    alone = Engine({"target": Toy()})
    plain = alone.submit([5, 6, 7], params, PLAIN)
    finished(alone)
    engine = Engine({"target": Toy(pages=13, page_size=8)})
    low = engine.submit([5, 6, 7], params, PLAIN, priority=9)
    high = [engine.submit([9, 8, i], params, PLAIN) for i in range(2)]
    finished(engine)
    assert low.counts.preempted > 0
    assert all(sequence.counts.preempted == 0 for sequence in high)
    assert low.output == plain.output


def test_a_long_prompt_is_read_in_pieces_that_hardly_hold_up_the_others() -> None:
    """A pass costs 1 and 1/40 per node: with 4 talking, 66 nodes more are in order."""
    cost = Cost({1: 1.025, 201: 6.025}, frozen=True)
    engine = Engine({"target": Toy(context=2048, pages=512)}, cost=cost)
    params = SamplingParams(max_tokens=200)
    talking = [engine.submit([5, 6, i], params, PLAIN) for i in range(4)]
    for _ in range(3):
        engine.step()
    long = engine.submit([1 + i % 20 for i in range(600)], SamplingParams(max_tokens=3), PLAIN)
    before, sizes = engine.ledger.total.nodes, []
    while not long.output:
        engine.step()
        sizes.append(engine.ledger.total.nodes - before)
        before = engine.ledger.total.nodes
    curve = cost.curve(256)
    assert max(curve[size] for size in sizes) <= PATIENCE * curve[4] + 1e-9
    assert max(sizes) > 4 + PROGRESS
    assert all(len(sequence.output) > len(sizes) for sequence in talking)  # nobody missed a pass
    finished(engine)


def test_one_who_talks_does_not_hold_up_many_who_read() -> None:
    cost = Cost({1: 1.025, 201: 6.025}, frozen=True)
    engine = Engine({"target": Toy(context=2048, pages=1024)}, cost=cost)
    engine.submit([5, 6, 7], SamplingParams(max_tokens=200), PLAIN)
    engine.step()
    readers = [
        engine.submit([1 + i, *([2, 3] * 100)], SamplingParams(max_tokens=2), PLAIN, salt=str(i))
        for i in range(10)
    ]
    steps = 0
    while not all(reader.output for reader in readers):
        engine.step()
        steps += 1
    assert steps <= 17  # 2,010 tokens in passes of 256, most of the way


def test_alone_a_prompt_is_read_as_fast_as_can_be() -> None:
    engine = Engine({"target": Toy(context=2048, pages=512)}, cost=Cost({1: 1.0, 9: 9.0}))
    engine.submit([1 + i % 20 for i in range(600)], SamplingParams(max_tokens=1), PLAIN)
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
    assert steps <= 5


def test_a_dear_pass_still_reads_on() -> None:
    engine = Engine({"target": Toy()}, cost=Cost({1: 1.0, 9: 900.0}, frozen=True))
    engine.submit([5, 6, 7], SamplingParams(max_tokens=100), PLAIN)
    engine.step()
    long = engine.submit([1 + i % 20 for i in range(80)], SamplingParams(max_tokens=3), PLAIN)
    for _ in range(80 // PROGRESS + 3):
        engine.step()
    assert long.output
