"""The expected speed-up of a draft head, and the plot of a training run."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from outstride.models.load import Loaded
from outstride.train.loss_plot import loss_plot
from outstride.train.speedup_estimate import cost_curve, estimate_speedup

FLAT = {1: 1.0, 8: 1.0}
STEEP = {1: 1.0, 2: 2.0, 8: 8.0}


def test_free_nodes_are_all_used() -> None:
    found = estimate_speedup([0.8, 0.5, 0.2], 0.0, FLAT)
    assert found.draft_tokens == 3
    assert found.tokens_per_pass == pytest.approx(2.5)
    assert found.speedup == pytest.approx(2.5)


def test_what_a_draft_costs_counts() -> None:
    assert estimate_speedup([0.8, 0.5, 0.2], 0.25, FLAT).speedup == pytest.approx(2.0)


def test_no_more_draft_tokens_than_pay() -> None:
    found = estimate_speedup([0.9, 0.4, 0.01], 0.0, {1: 1.0, 4: 1.6})  # a fifth of a pass for each
    assert found.draft_tokens == 2
    assert found.speedup == pytest.approx(2.3 / 1.4)


@pytest.mark.parametrize(("shares", "overhead"), [([0.9, 0.9], 0.0), ([], 0.0), ([0.3], 0.5)])
def test_drafting_may_not_pay(shares: list[float], overhead: float) -> None:
    found = estimate_speedup(shares, overhead, STEEP if shares != [0.3] else FLAT)
    assert (found.draft_tokens, found.speedup) == (0, 1.0)


def test_the_curve_of_a_model(tiny_model: Loaded) -> None:
    from outstride import LLM

    with LLM(tiny_model) as llm:
        curve = cost_curve(llm)
        assert min(curve) == 1
        assert max(curve) >= 16
        assert min(curve.values()) > 0
        assert list(curve.values()) == sorted(curve.values())
        llm.engine.check_integrity()  # the pages it used are back


def test_pictures_are_drawings_of_every_run() -> None:
    for losses, measured in (
        ([], []),
        ([1.0], [(0, 1.0)]),
        ([5.0 - i / 1000 for i in range(2000)], [(0, 1.0), (1000, 1.5), (2000, 2.0)]),
        ([2.0, 2.0], [(0, 1.0), (2, 1.0)]),
    ):
        root = ElementTree.fromstring(loss_plot(losses, measured, "a <b> & c"))
        space = "{http://www.w3.org/2000/svg}"
        lines = root.findall(f"{space}polyline")
        assert len(lines) == 2
        assert len(root.findall(f"{space}circle")) == len(measured)
        for line in lines:
            for pair in line.attrib["points"].split():
                x, y = map(float, pair.split(","))
                assert 64 <= x <= 784
                assert 36 <= y <= 36 + 2 * 256
    assert "a &lt;b&gt; &amp; c" in loss_plot([], [], "a <b> & c")


def test_masks_below_each_draft_token_cost_nodes_too() -> None:
    """Two guesses with two masks below each, and below the last settled token: nine nodes."""
    line = {1: 1.0, 16: 2.5}
    found = estimate_speedup([0.8, 0.7, 0.6], 0.0, line, masks_per_node=1.0)
    assert found.draft_tokens == 2
    assert found.speedup == pytest.approx(2.5 / 1.8)
    assert estimate_speedup([0.1, 0.1], 0.0, line, masks_per_node=1.0).draft_tokens == 0
