"""Every registered method keeps its text inside the request's grammar, whatever it accepts at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outstride import registry
from outstride.core.contracts import Exactness
from outstride.core.graph import BoolArray
from outstride.core.params import SamplingParams
from tests.conformance.harness import VOCABULARY, Bench, some_prompts
from tests.conformance.masked import KINDS, PAIRS
from tests.conformance.test_registry import variants

SAMPLED = SamplingParams(max_tokens=24, temperature=0.9, seed=7)


class Alternating:
    """Even and odd tokens take turns, and some tokens are never allowed: every step depends on the
    token before it."""

    def allowed(self, output: Sequence[int]) -> BoolArray | None:
        mask = np.ones(VOCABULARY, dtype=np.bool_)
        if output:
            mask[output[-1] % 2 :: 2] = False
        mask[[2, 5]] = False
        return mask


def follows(output: Sequence[int]) -> bool:
    """Whether a whole text is one that `Alternating` allows."""
    grammar = Alternating()
    masks = (grammar.allowed(output[:i]) for i in range(len(output)))
    return all(mask is None or mask[t] for mask, t in zip(masks, output, strict=True))


AMPLE, SMALL = {"nodes": 512, "pages": 200}, {"nodes": 30, "pages": 40}


def check(spec: str, kind: dict[str, Any], params: SamplingParams, limits: dict[str, Any]) -> None:
    prompts = some_prompts(3, 4, max_length=16)
    method = registry.build(spec)
    for sequence in Bench(**kind, **limits).run(prompts, method, params, grammar=Alternating()):
        assert follows(sequence.output), sequence.output


@pytest.mark.parametrize(("temperature", "limits"), [(0.0, AMPLE), (0.9, SMALL)])
@pytest.mark.parametrize("spec", [s for kind in Exactness for s in variants(kind)])
def test_causal_methods_keep_the_grammar(
    spec: str, temperature: float, limits: dict[str, int]
) -> None:
    check(spec, {}, replace(SAMPLED, temperature=temperature), limits)


MASKED = [pair for pair in PAIRS if not pair[0].startswith("regex")]


@pytest.mark.parametrize(
    ("spec", "kind", "limits"),
    [(*pair, (AMPLE, SMALL)[i % 2]) for i, pair in enumerate(MASKED)],
)
def test_masked_methods_keep_the_grammar(spec: str, kind: str, limits: dict[str, int]) -> None:
    """Every method for every kind of model; the limits take turns among them."""
    check(spec, KINDS[kind], replace(SAMPLED, max_tokens=12), limits)


def test_a_confident_run_follows_the_grammar_beyond_its_first_token() -> None:
    """A method that stops at its first token would keep every grammar."""
    found = Bench(nodes=512, pages=200).run(
        some_prompts(3, 6, max_length=16),
        registry.build("confident:sure=0.02"),
        replace(SAMPLED, ignore_eos=True),
        grammar=Alternating(),
    )
    assert sum(s.counts.passes for s in found) < sum(s.counts.emitted for s in found)
    assert all(follows(s.output) for s in found)
