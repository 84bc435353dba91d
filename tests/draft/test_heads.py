"""Medusa heads start from the hidden state of the node that chose the last token, and no other."""

from __future__ import annotations

import pytest

from outstride import registry
from outstride.core.params import SamplingParams
from outstride.core.sequence import View
from outstride.errors import IntegrityError, UnsupportedModel
from tests.conformance.harness import Bench, some_prompts


@pytest.mark.parametrize("spec", ["heads:from=heads", "heads:from=sequential"])
def test_another_hidden_state_is_noticed(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy model knows which hidden state it should be: all other tests rely on that."""
    prompts, params = some_prompts(2, 3), SamplingParams(max_tokens=12, ignore_eos=True)
    Bench().run(prompts, registry.build(spec), params)
    read = View.feature
    monkeypatch.setattr(View, "feature", lambda view, at: read(view, max(0, at - 1)))
    with pytest.raises(IntegrityError, match="starts from another hidden state"):
        Bench().run(prompts, registry.build(spec), params)


@pytest.mark.parametrize("spec", ["heads:from=heads", "heads:from=sequential"])
def test_hidden_states_survive_preemption_forks_and_prefix_hits(spec: str) -> None:
    prompt = some_prompts(2, 1)[0] * 3
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=5, n=3)
    plain, found = (
        Bench(shake=3).run([prompt, prompt, prompt], registry.build(name), params)
        for name in ("plain", spec)
    )
    for one, other in zip(plain, found, strict=True):
        assert [s.output for s in one.group] == [s.output for s in other.group]
    assert sum(s.counts.accepted for leader in found for s in leader.group) > 0


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("heads:from=block", "is BlockDraftHead .* drafts with MedusaDraftHead"),
        ("block-drafter:from=eagle", "is EagleDraftHead .* drafts with BlockDraftHead"),
        ("eagle:from=heads", "is MedusaDraftHead .* drafts with EagleDraftHead"),
        ("prompt-tokens:from=heads", "drafts with PromptTokensHead; pass from=FOLDER"),
    ],
)
def test_a_draft_head_of_another_kind_is_an_error(spec: str, match: str) -> None:
    with pytest.raises(UnsupportedModel, match=match):
        Bench().run(some_prompts(2, 1), registry.build(spec), SamplingParams(max_tokens=8))
