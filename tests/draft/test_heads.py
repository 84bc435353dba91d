"""Heads start from the state of the node that chose the last token, and from no other."""

from __future__ import annotations

import pytest

from outstride import registry
from outstride.core.params import SamplingParams
from outstride.core.sequence import View
from outstride.errors import IntegrityError
from tests.conformance.harness import Bench, some_prompts


@pytest.mark.parametrize("spec", ["heads:from=heads", "heads:from=chained"])
def test_another_state_is_noticed(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy knows which state it should be: this is what keeps all other tests honest."""
    prompts, params = some_prompts(2, 3), SamplingParams(max_tokens=12, ignore_eos=True)
    Bench().run(prompts, registry.build(spec), params)
    read = View.feature
    monkeypatch.setattr(View, "feature", lambda view, at: read(view, max(0, at - 1)))
    with pytest.raises(IntegrityError, match="starts from another state"):
        Bench().run(prompts, registry.build(spec), params)


@pytest.mark.parametrize("spec", ["heads:from=heads", "heads:from=chained"])
def test_states_survive_preemption_forks_and_prefixes(spec: str) -> None:
    prompt = some_prompts(2, 1)[0] * 3
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=5, n=3)
    plain, found = (
        Bench(shake=3).run([prompt, prompt, prompt], registry.build(name), params)
        for name in ("plain", spec)
    )
    for one, other in zip(plain, found, strict=True):
        assert [s.output for s in one.group] == [s.output for s in other.group]
    assert sum(s.counts.accepted for leader in found for s in leader.group) > 0
