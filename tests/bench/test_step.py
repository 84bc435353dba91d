"""Timing of passes, on the toy: right shapes, nothing left behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from outstride.bench import step
from outstride.core.contracts import AttentionPattern, PassInput, PendingPass
from outstride.core.proposal import TARGET
from outstride.engine.model_runner import ModelRunner
from outstride.errors import InvalidParams
from outstride.models.toy import Toy


class Watched(Toy):
    """Remembers the shape of every pass."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.shapes: list[tuple[tuple[int, int], ...]] = []

    def forward(self, work: Sequence[PassInput]) -> PendingPass:
        self.shapes.append(tuple((len(w.table), len(w.proposal.graph)) for w in work))
        for item in work:  # entries must be honest all the way
            assert list(item.table.positions) == list(range(len(item.table)))
            assert len(set(item.slots.tolist())) == len(item.slots)
        return super().forward(work)


def passes_on(model: Toy) -> ModelRunner:
    return ModelRunner({TARGET: model}, ())


def test_every_case_is_timed_with_the_shape_it_names() -> None:
    model = Watched(pages=256)
    passes = passes_on(model)
    wanted = step.cases(nodes=[1, 4], cached=10, lengths=[0, 6, 21], sequences=[1, 3])
    ticks: list[tuple[int, int]] = []
    report = step.measure(
        passes, wanted, repeat=2, warmups=1, progress=lambda *now: ticks.append(now)
    )
    assert report.skipped == {}
    assert list(report.series) == wanted
    assert all(len(series.seconds) == 2 for series in report.series.values())
    expected = [
        ((10, 1),),
        ((10, 4),),
        ((0, 1),),
        ((6, 1),),
        ((21, 1),),
        ((10, 1),),
        ((10, 1),) * 3,
    ]
    assert model.shapes[-7 * 3 :] == expected * 3
    assert ticks[-1] == (23, 23)  # two passes fill the cache
    passes.pools[TARGET].check_integrity([])
    assert passes.pools[TARGET].available == 256


def test_samples_and_summary() -> None:
    wanted = step.cases(nodes=[1, 2], cached=4, lengths=[0], sequences=[2])
    report = step.measure(passes_on(Toy()), wanted, repeat=3)
    assert [sample["sweep"] for sample in report.samples()] == [
        "nodes",
        "nodes",
        "cached",
        "sequences",
    ]
    summary = report.summary()
    assert {k: list(v) for k, v in summary["milliseconds"].items()} == {
        "nodes": ["1", "2"],
        "cached": ["0"],
        "sequences": ["2"],
    }
    assert summary["skipped"] == []


def test_what_does_not_fit_is_left_out_and_said() -> None:
    passes = passes_on(Toy(pages=8, page_size=4, context=64))
    wanted = step.cases(nodes=[1, 40], cached=8, lengths=[16, 40, 100], sequences=[1, 16])
    report = step.measure(passes, wanted, repeat=1, warmups=0)
    assert {(case.sweep, case.value): reason for case, reason in report.skipped.items()} == {
        ("nodes", 40): "the KV cache has too few pages",
        ("cached", 40): "the KV cache has too few pages",
        ("cached", 100): "the model's context holds 64",
        ("sequences", 16): "the KV cache has too few pages",
    }
    assert len(report.series) == 3
    assert passes.pools[TARGET].available == 8


def test_bad_settings_are_refused() -> None:
    with pytest.raises(InvalidParams):
        step.cases(nodes=[0])
    with pytest.raises(InvalidParams):
        step.cases(cached=-1)
    with pytest.raises(InvalidParams):
        step.measure(passes_on(Toy()), step.cases(), repeat=0)
    with pytest.raises(InvalidParams, match="causal"):
        step.measure(passes_on(Toy(attention_pattern=AttentionPattern(block=4))), step.cases())
