"""`early-exit`: no layer computed twice; exit layer and length follow acceptance rates."""

from __future__ import annotations

import pytest

from outstride import registry
from outstride.core.draft_tree import AcceptanceEstimator
from outstride.core.prefix_key import PrefixKey
from outstride.core.sequence import View
from outstride.draft.early_exit import RETRY, EarlyExit, _key
from outstride.errors import UnknownMethod
from tests.conformance.harness import SAMPLINGS, Bench, some_prompts
from tests.draft.script import Script


def choice(drafter: EarlyExit, estimator: AcceptanceEstimator, steps: int = 1) -> tuple[int, int]:
    script = Script(drafter, [1, 2, 3], [0] * 40)
    script.sequence.steps = steps
    plain = script.view
    view = View(script.sequence, plain._patterns, plain.limit, 1, layers=40).with_state(estimator)
    layer, length, _ = drafter._choice(view)
    return layer, length


def estimator_of(**rates: float) -> AcceptanceEstimator:
    estimator = AcceptanceEstimator()
    for name, rate in rates.items():
        for i in range(200):
            estimator.learn(_key(int(name[1:])), (i * 7) % 100 < 100 * rate)
    return estimator


def test_exit_and_length_follow_acceptance() -> None:
    """Exits of a model with 40 layers: 10, 14, 20, 28."""
    assert choice(EarlyExit(), estimator_of(l10=0.95, l14=0.95, l20=0.95, l28=0.95)) == (10, 6)
    layer, length = choice(EarlyExit(), estimator_of(l10=0.0, l14=0.0, l20=0.95, l28=0.95))
    assert layer == 20
    assert 1 <= length <= 6
    short = choice(EarlyExit(), estimator_of(l10=0.45, l14=0.0, l20=0.0, l28=0.0))
    assert short == (10, 1)


def test_exits_that_do_not_pay_are_tried_again() -> None:
    useless = estimator_of(l10=0.0, l14=0.0, l20=0.0, l28=0.0)
    chosen = [choice(EarlyExit(), useless, steps) for steps in range(4 * RETRY)]
    assert sum(length for _, length in chosen) == 4
    assert {layer for layer, length in chosen if length} == {10, 14, 20, 28}


def test_fixed_options_are_used() -> None:
    useless = estimator_of(l7=0.0)
    assert choice(EarlyExit(layer=7, length=3), useless) == (7, 3)
    assert choice(EarlyExit(layer=40, length=3), useless) == (0, 0)
    assert choice(EarlyExit(length=2), estimator_of(l10=0.0, l14=0.9, l20=0.0, l28=0.0)) == (14, 2)
    assert choice(EarlyExit(layer=14), estimator_of(l14=0.9))[0] == 14


def test_a_model_without_depth_drafts_nothing() -> None:
    script = Script(EarlyExit(), [1, 2, 3], [0] * 9)
    assert script.drafter.demand(script.view).max_nodes == 0


def test_acceptance_is_tracked_per_exit() -> None:
    bench = Bench()
    method = registry.build("early-exit")
    found = bench.run(some_prompts(6, 8), method, SAMPLINGS["endless"])
    assert isinstance(method.drafter, EarlyExit)
    tracked = method.drafter._rates.of(found[0].key).rate(_key(1), 0.5)
    accepted = sum(s.counts.accepted for s in found)
    assert 0.02 < tracked < 0.98
    assert accepted > 0
    other = method.drafter._rates.of(PrefixKey(tenant="another")).rate(_key(1), 0.5)
    assert other == 0.5


def test_every_node_passes_each_layer_once() -> None:
    """Rounds over the first layers are counted apart; the target's own pass goes on from them."""
    bench = Bench()
    method = registry.build("early-exit:layer=1,length=3")
    [sequence] = bench.run([[3, 4, 5]], method, SAMPLINGS["endless"])
    steps = sequence.counts.passes
    assert sequence.counts.other_passes <= 4 * steps
    assert sequence.counts.other_passes >= 3 * (steps - 2)


@pytest.mark.parametrize("spec", ["early-exit:layer=-1", "early-exit:length=-1"])
def test_senseless_options_are_refused(spec: str) -> None:
    with pytest.raises(UnknownMethod, match="needs"):
        registry.build(spec)
