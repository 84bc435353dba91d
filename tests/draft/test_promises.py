"""What drafts promise: believed as far as it was kept, and by kinds of steps."""

from __future__ import annotations

import pytest

from outstride import registry
from outstride.core.params import SamplingParams
from outstride.draft.mix import SAMPLED
from outstride.draft.promises import (
    FIRST_NODES,
    KINDS,
    PROMISES,
    Chains,
    Forecast,
    Promises,
    affordable,
    kind_of,
)
from tests.conformance.harness import Bench, toy_method


def test_promises_are_believed_as_far_as_they_were_kept() -> None:
    everybody = Forecast()
    one = Forecast(everybody)
    for _ in range(30):
        one.settle(2.0, 1)
    assert one.trust == pytest.approx(0.55, abs=0.05)
    assert sum(one.believed(PROMISES)) == pytest.approx(one.trust * sum(PROMISES))
    two = Forecast(everybody)
    assert everybody.trust < two.trust < 1.0  # others count, but not as much as what it will see
    for _ in range(60):
        two.settle(1.0, 1)
    assert two.trust > 0.9
    assert sum(two.believed(PROMISES)) <= sum(PROMISES)
    assert Forecast(share=SAMPLED).trust == SAMPLED
    assert Promises(Promises(share=SAMPLED)).asked.trust == SAMPLED


def test_every_sequence_begins_with_the_first_word() -> None:
    base = Promises()
    for _ in range(100):
        Promises(base).learn(0, [0.0] * 8)
    assert Promises(base).asked.gains == list(PROMISES)


def test_nobody_asked_for_long_is_asked_again() -> None:
    forecast = Forecast()
    for _ in range(40):
        forecast.learn([0.0] * len(PROMISES))
        forecast.settle(1.0, 0)
    low = sum(forecast.believed(forecast.gains))
    forecast.fade(400)
    assert low < 0.05
    assert sum(forecast.believed(forecast.gains)) > 0.8 * sum(PROMISES)


def test_kinds_of_steps_are_told_apart_by_what_was_looked_up() -> None:
    assert kind_of(()) == 0
    assert kind_of([0.1] * FIRST_NODES * 3) == kind_of([0.1] * FIRST_NODES) == 2
    assert kind_of([1.0] * FIRST_NODES) == len(KINDS)
    base = Promises()
    one, two = Promises(base), Promises(base)
    for _ in range(60):
        one.learn(0, [0.5, 0.3, 0.1])
        one.learn(3, [0.9, 0.8, 0.7])
    assert sum(two.asking(0, ())) < 0.8 * sum(two.asking(3, ()))  # they find out together
    assert max(two.asking(3, ())) <= 1.0
    assert two.asking(0, (0.95,))[0] == 0.95  # what was looked up is there in any case
    assert two.asking(0, [0.01] * 40)[-1] == 0.01


def test_what_is_looked_up_is_believed_by_kind() -> None:
    promises = Promises(Promises())
    for _ in range(50):
        promises.settle(1, 1.0, 0, asked=False)
        promises.settle(2, 1.0, 1, asked=False)
    assert promises.looked[1].trust < 0.35
    assert promises.looked[2].trust > 0.9
    assert promises.asked.trust == 1.0


def test_nodes_are_taken_as_far_as_their_sum_pays() -> None:
    gains = [0.7, 0.5, 0.3, 0.2, 0.15, 0.1]
    assert affordable(gains, [0.12] * 6) == 5
    assert affordable(gains, [0.12] * 2) == 2
    assert affordable(gains, [0.1, 0.1, 0.9, 0.05, 0.05, 0.05]) == 2  # a new tile does not pay
    assert affordable(gains, [0.1, 0.1, 0.5, 0.01, 0.01, 0.01]) == 6  # now it does, once it is full
    assert affordable(gains, [0.8] * 6) == affordable((), [0.1]) == 0


def test_chains_are_followed_by_their_mean_and_forgotten_slowly() -> None:
    chains = Chains(Chains())
    assert sum(chains.gains(50)) == pytest.approx(1.0)  # the first word: one token of a chain holds
    for _ in range(4):
        for held in (0, 3, 1, 0):
            chains.settle(1.0, held)
    assert sum(chains.gains(50)) == pytest.approx(1.0, rel=0.1)  # no single step turns it
    for _ in range(30):
        chains.settle(1.0, 0)
    low = sum(chains.gains(7))
    assert low < 0.25
    for _ in range(20):
        chains.fade()
    assert sum(chains.gains(7)) < 1.3 * low
    for _ in range(2000):
        chains.fade()
    assert sum(chains.gains(50)) > 0.5


def test_a_draft_without_a_part_settles_what_was_looked_up() -> None:
    """`auto` without a trained part is told to ask by default, and there is nobody to ask."""
    auto = registry.build("auto").drafter
    engine = Bench()
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    seen: list[bool] = []
    real = Promises.settle

    def settle(self: Promises, kind: int, promised: float, held: int, asked: bool) -> None:
        seen.append(asked)
        real(self, kind, promised, held, asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Promises, "settle", settle)
        engine.run([[1, 2, 3, 4] * 12], toy_method(auto, registry.build("plain").acceptor), params)
    assert seen
    assert not any(seen)
