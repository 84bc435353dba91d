"""Lossy methods change the text where they declare it, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest

from outstride import registry
from outstride.core.contracts import Exactness
from outstride.core.softmax import entropy, softmax
from outstride.draft.typical import TypicalAcceptance
from outstride.errors import UnknownMethod
from tests.conformance.harness import SAMPLINGS, Bench, alone, some_prompts

PROMPTS = some_prompts(4, 6)


def same(spec: str, sampling: str) -> bool:
    params = SAMPLINGS[sampling]
    found = Bench(nodes=256).run(PROMPTS, registry.build(spec), params)
    return [s.output for s in found] == [alone(prompt, params) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("spec", "sampling"),
    [
        ("typical:model=draft", "greedy"),
        ("typical:model=draft", "stopped"),
        ("rooted:model=draft,width=1", "greedy"),
        ("rooted:model=draft,width=1", "sampled"),
        ("entropy-switch:model=draft,entropy=0.01", "sampled"),
        ("confident:sure=1", "sampled"),
    ],
)
def test_settings_under_which_they_are_exact(spec: str, sampling: str) -> None:
    assert same(spec, sampling)


@pytest.mark.parametrize(
    "spec",
    [
        "typical:model=draft",
        "rooted:model=draft",
        "entropy-switch:model=draft,entropy=2.4",
        "confident:sure=0.1",
    ],
)
def test_they_change_the_text(spec: str) -> None:
    assert registry.build(spec).exactness is Exactness.LOSSY
    assert not same(spec, "sampled")


def test_an_undecided_target_lowers_the_threshold() -> None:
    rule = TypicalAcceptance(model="draft", epsilon=0.3, delta=0.5)
    sure = np.asarray([0.98, 0.01, 0.01], dtype=np.float32)
    undecided = np.full(8, 0.125, dtype=np.float32)
    assert rule.threshold(sure) == pytest.approx(0.3)
    assert rule.threshold(undecided) == pytest.approx(0.5 / 8, rel=1e-3)


def test_options_reach_the_acceptor() -> None:
    method = registry.build("typical:model=draft,epsilon=0.5")
    assert isinstance(method.acceptor, TypicalAcceptance)
    assert (method.acceptor.epsilon, method.acceptor.delta) == (0.5, 0.3)
    for spec in (
        "typical:model=draft,epsilon=0",
        "confident:sure=2",
        "entropy-switch:model=x,entropy=0",
    ):
        with pytest.raises(UnknownMethod):
            registry.build(spec)


def test_entropy() -> None:
    assert entropy(softmax(np.zeros(10, dtype=np.float32))) == pytest.approx(np.log(10))
    assert entropy(softmax(np.asarray([50.0, 0.0], dtype=np.float32))) == pytest.approx(
        0.0, abs=1e-6
    )
