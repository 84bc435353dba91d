"""`auto` where a draft head finds chains on the device: it drafts these alone, while they pay."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from outstride import registry
from outstride.core.params import SamplingParams
from outstride.core.proposal import TARGET
from outstride.core.sequence import Sequence
from outstride.engine.engine import Engine
from outstride.models.decoder import Decoder
from outstride.models.draft_heads import attach
from outstride.policy.calibration import ChainCalibration
from outstride.policy.cost_model import CostModel, DraftSource
from outstride.policy.policy import DraftPolicy
from tests.models.drive import random_decoder, tiny, tokens
from tests.models.test_draft_heads import part_tensors, write_part
from tests.models.test_overlapped_drafting import bigrams

CHEAP = {1: 1.0, 2: 1.01, 8: 1.05, 64: 1.3}
"""Seconds of passes by nodes, as on a GPU."""


def generate(
    model: Decoder,
    spec: str,
    prompt: list[int],
    temperature: float,
    part: str = "",
    cost: CostModel | None = None,
) -> Sequence:
    method = registry.build(f"{spec}:from={part}" if part else spec)
    engine = Engine({TARGET: model}, policy=DraftPolicy(cost or CostModel(CHEAP, frozen=True)))
    params = SamplingParams(max_tokens=80, temperature=temperature, seed=3, ignore_eos=True)
    sequence = engine.submit(prompt, params, method)
    while engine.busy:
        engine.step()
    assert sequence.error is None
    return sequence


@pytest.fixture
def model() -> Decoder:
    registry.discover()
    return random_decoder(tiny(layers=3, tied=True), pages=64, rounded=True)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_head_that_is_right_drafts_alone(
    model: Decoder, tmp_path: Path, temperature: float
) -> None:
    config, prompt = tiny(layers=3, tied=True), tokens(20)
    plain = generate(model, "plain", prompt, temperature)
    part = part_tensors(config)
    bigrams(part, list(plain.tokens))
    attach(model, "part", write_part(tmp_path / "part", config, part), "abc")
    model.draft_heads["part"] = replace(model.draft_heads["part"], device_chain=True)
    found = generate(model, "auto", prompt, temperature, "part")
    assert found.tokens == plain.tokens
    assert found.counts.passes < plain.counts.passes
    assert set(found.counts.sources) == {"block-drafter"}


def test_a_head_that_is_wrong_is_rarely_used(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its record fades at each step without it: texts change."""
    fades: list[int] = []
    monkeypatch.setattr(ChainCalibration, "fade", lambda self, steps=1: fades.append(steps))
    config, prompt = tiny(layers=3, tied=True), tokens(20)
    plain = generate(model, "plain", prompt, 0.0)
    folder = write_part(tmp_path / "part", config, part_tensors(config))
    attach(model, "part", folder, "abc")
    model.draft_heads["part"] = replace(model.draft_heads["part"], device_chain=True)
    found = generate(model, "auto", prompt, 0.0, "part")
    assert found.tokens == plain.tokens
    assert found.counts.drafts < 0.5 * found.counts.passes
    assert sum(fades) + found.counts.drafts >= found.counts.passes - 1
    assert found.counts.other_passes < 0.5 * found.counts.passes


class Known(CostModel):
    """A frozen curve, and a given cost of overlapped drafts, which may be negative."""

    further = 0.0

    def draft_seconds(self, count: int, source: DraftSource) -> float:
        overlapped = source is DraftSource.OVERLAPPED_HEAD
        return self.further if overlapped else super().draft_seconds(count, source)


@pytest.mark.parametrize(("further", "drafts"), [(-2.0, True), (2.0, False)])
def test_the_whole_step_decides(
    model: Decoder, tmp_path: Path, further: float, drafts: bool
) -> None:
    """A pass over a chain may look expensive, and be under way while its draft is awaited."""
    config, prompt = tiny(layers=3, tied=True), tokens(20)
    plain = generate(model, "plain", prompt, 0.0)
    part = part_tensors(config)
    bigrams(part, list(plain.tokens))
    attach(model, "part", write_part(tmp_path / "part", config, part), "abc")
    model.draft_heads["part"] = replace(model.draft_heads["part"], device_chain=True)
    cost = Known({1: 1.0, 2: 2.0, 8: 3.0, 64: 4.0}, frozen=True)
    cost.further = further
    found = generate(model, "auto", prompt, 0.0, "part", cost)
    assert found.tokens == plain.tokens
    assert (found.counts.drafts > 0) == drafts


def test_chains_that_bring_nothing_are_tried_less_and_less(model: Decoder, tmp_path: Path) -> None:
    """Plain steps look expensive here. A sequence that only drafts would never learn better."""
    config, prompt = tiny(layers=3, tied=True), tokens(20)
    attach(model, "part", write_part(tmp_path / "part", config, part_tensors(config)), "abc")
    model.draft_heads["part"] = replace(model.draft_heads["part"], device_chain=True)
    cost = Known({1: 5.0, 8: 5.05, 64: 5.3}, frozen=True)
    cost.further = -4.0
    found = generate(model, "auto", prompt, 0.0, "part", cost)
    assert found.counts.passes == 80
    drafted = [entry.step for entry in found.trace if entry.kind != "plain"]
    first = next(i for i, (a, b) in enumerate(pairwise(drafted), start=1) if b > a + 1)
    assert 4 <= first <= 6
    assert drafted[first] - drafted[first - 1] > 32
    assert len(drafted) < 2 * first


def test_where_chains_bring_nothing_to_any_sequence_one_trial_is_enough(
    model: Decoder, tmp_path: Path
) -> None:
    config = tiny(layers=3, tied=True)
    attach(model, "part", write_part(tmp_path / "part", config, part_tensors(config)), "abc")
    model.draft_heads["part"] = replace(model.draft_heads["part"], device_chain=True)
    method, cost = registry.build("auto:from=part"), Known({1: 5.0, 8: 5.05, 64: 5.3}, frozen=True)
    cost.further = -4.0
    engine, trials = Engine({TARGET: model}, policy=DraftPolicy(cost)), []
    for seed in range(8):
        params = SamplingParams(max_tokens=80, temperature=1.5, seed=seed, ignore_eos=True)
        sequence = engine.submit(tokens(20, seed=seed), params, method)
        while engine.busy:
            engine.step()
        drafted = [entry.step for entry in sequence.trace if entry.kind != "plain"]
        trials.append(1 + sum(b > a + 1 for a, b in pairwise(drafted)))
    assert max(trials[:2]) > 1  # the first sequences are tried again
    assert trials[-3:] == [1, 1, 1]
