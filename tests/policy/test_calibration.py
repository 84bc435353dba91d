"""Calibration: expected acceptance is corrected by what came true, by group of steps."""

from __future__ import annotations

import pytest

from outstride import registry
from outstride.core.params import SamplingParams
from outstride.policy.calibration import (
    ChainCalibration,
    HeadCalibration,
    SourceCalibration,
    head_prior,
    level_of,
    num_worthwhile,
)
from outstride.policy.config import DEFAULT_CONFIG
from tests.conformance.harness import Bench, toy_method

PRIOR, SAMPLED = head_prior(), DEFAULT_CONFIG.sampled_head_prior


def test_expectations_are_corrected_by_what_came_true() -> None:
    shared = HeadCalibration()
    one = HeadCalibration(shared)
    for _ in range(30):
        one.observe(2.0, 1)
    assert one.factor == pytest.approx(0.55, abs=0.05)
    assert sum(one.calibrated(PRIOR)) == pytest.approx(one.factor * sum(PRIOR))
    two = HeadCalibration(shared)
    assert (
        shared.factor < two.factor < 1.0
    )  # other sequences count, but less than its own drafts will
    for _ in range(60):
        two.observe(1.0, 1)
    assert two.factor > 0.9
    assert sum(two.calibrated(PRIOR)) <= sum(PRIOR)
    assert HeadCalibration(prior=SAMPLED).factor == SAMPLED
    assert SourceCalibration(SourceCalibration(prior=SAMPLED)).head.factor == SAMPLED


def test_every_sequence_begins_with_the_prior() -> None:
    base = SourceCalibration()
    for _ in range(100):
        SourceCalibration(base).learn(0, [0.0] * 8)
    assert SourceCalibration(base).head.gains == list(PRIOR)


def test_a_head_that_was_not_used_for_long_is_tried_again() -> None:
    head = HeadCalibration()
    for _ in range(40):
        head.learn([0.0] * len(PRIOR))
        head.observe(1.0, 0)
    low = sum(head.calibrated(head.gains))
    head.fade(400)
    assert low < 0.05
    assert sum(head.calibrated(head.gains)) > 0.8 * sum(PRIOR)


def test_steps_are_grouped_by_what_was_looked_up() -> None:
    assert level_of(()) == 0
    assert (
        level_of([0.1] * DEFAULT_CONFIG.level_nodes * 3)
        == level_of([0.1] * DEFAULT_CONFIG.level_nodes)
        == 2
    )
    assert level_of([1.0] * DEFAULT_CONFIG.level_nodes) == len(DEFAULT_CONFIG.lookup_gain_levels)
    base = SourceCalibration()
    one, two = SourceCalibration(base), SourceCalibration(base)
    for _ in range(60):
        one.learn(0, [0.5, 0.3, 0.1])
        one.learn(3, [0.9, 0.8, 0.7])
    assert sum(two.gains_with_head(0, ())) < 0.8 * sum(
        two.gains_with_head(3, ())
    )  # sequences learn it together
    assert max(two.gains_with_head(3, ())) <= 1.0
    assert two.gains_with_head(0, (0.95,))[0] == 0.95  # lookups count in any case
    assert two.gains_with_head(0, [0.01] * 40)[-1] == 0.01


def test_lookups_are_calibrated_by_group() -> None:
    calibration = SourceCalibration(SourceCalibration())
    for _ in range(50):
        calibration.observe(1, 1.0, 0, with_head=False)
        calibration.observe(2, 1.0, 1, with_head=False)
    assert calibration.lookups[1].factor < 0.35
    assert calibration.lookups[2].factor > 0.9
    assert calibration.head.factor == 1.0


def test_nodes_are_taken_as_long_as_their_sum_pays() -> None:
    gains = [0.7, 0.5, 0.3, 0.2, 0.15, 0.1]
    assert num_worthwhile(gains, [0.12] * 6) == 5
    assert num_worthwhile(gains, [0.12] * 2) == 2
    assert num_worthwhile(gains, [0.1, 0.1, 0.9, 0.05, 0.05, 0.05]) == 2  # a new tile does not pay
    assert (
        num_worthwhile(gains, [0.1, 0.1, 0.5, 0.01, 0.01, 0.01]) == 6
    )  # now it does, once it is full
    assert num_worthwhile(gains, [0.8] * 6) == num_worthwhile((), [0.1]) == 0


def test_chains_are_tracked_by_their_mean_and_forgotten_slowly() -> None:
    chains = ChainCalibration(ChainCalibration())
    assert sum(chains.gains(50)) == pytest.approx(
        1.0
    )  # the prior: one token of a chain is accepted
    for _ in range(4):
        for accepted in (0, 3, 1, 0):
            chains.observe(1.0, accepted)
    assert sum(chains.gains(50)) == pytest.approx(1.0, rel=0.1)  # no single step changes it much
    for _ in range(30):
        chains.observe(1.0, 0)
    low = sum(chains.gains(7))
    assert low < 0.25
    for _ in range(20):
        chains.fade()
    assert sum(chains.gains(7)) < 1.3 * low
    for _ in range(2000):
        chains.fade()
    assert sum(chains.gains(50)) > 0.5


def test_a_draft_without_a_head_calibrates_lookups() -> None:
    """`auto` without a draft head may use one by default, and there is none."""
    auto = registry.build("auto").drafter
    engine = Bench()
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    seen: list[bool] = []
    real = SourceCalibration.observe

    def observe(
        self: SourceCalibration, level: int, expected: float, accepted: int, with_head: bool
    ) -> None:
        seen.append(with_head)
        real(self, level, expected, accepted, with_head)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SourceCalibration, "observe", observe)
        engine.run([[1, 2, 3, 4] * 12], toy_method(auto, registry.build("plain").acceptor), params)
    assert seen
    assert not any(seen)
