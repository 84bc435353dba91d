"""Masked methods on real arithmetic: tiny decoders, in every batch."""

from __future__ import annotations

import random
from typing import Any

import pytest

from outstride import registry
from outstride.core.contracts import CAUSAL, FULL, AttentionPattern, MaskedSpec
from outstride.core.params import SamplingParams
from outstride.engine.engine import Engine
from outstride.engine.scheduler import Limits
from tests.conformance.test_decoders import IMPLEMENTATIONS
from tests.models.drive import random_decoder, tiny

MASK = 96
"""A token of the vocabulary, as in published models: it must never be generated."""

KINDS = {
    "blocks": (AttentionPattern(8), MaskedSpec(MASK, 8, shifted=False, causal=True)),
    "shifted blocks": (AttentionPattern(8), MaskedSpec(MASK, 8, shifted=True, causal=True)),
    "canvas": (FULL, MaskedSpec(MASK, None, shifted=False, causal=False)),
    "in turn": (CAUSAL, MaskedSpec(MASK, None, shifted=False, causal=True)),
}
SPECS = {
    "blocks": [
        "steps:count=2",
        "verify:count=2",
        "threshold:threshold=0.013",
        "pipeline:threshold=0.013",
        "refine:threshold=0.013,latent=1",
        "plain",
        "self-diffuse",
        "ngram",
    ],
    "shifted blocks": [
        "steps:count=2",
        "verify:count=2",
        "factor:factor=3",
        "plain",
        "self-diffuse",
    ],
    "canvas": ["steps:count=3", "verify:count=3,ahead=1", "entropy-bound:bound=9"],
    "in turn": ["steps:count=2", "any-subset", "pipeline:threshold=0.013", "plain", "self-diffuse"],
}


def run(kind: str, ops: str, requests: list[tuple[list[int], str, Any]], **limits: int) -> Any:
    vision, masking = KINDS[kind]
    model = random_decoder(tiny(layers=2), pages=limits["pages"], make_ops=IMPLEMENTATIONS[ops])
    model.attention_pattern, model.masked_spec = vision, masking
    engine = Engine({"target": model}, limits=Limits(nodes=limits["nodes"]))
    found = [engine.submit(p, params, registry.build(spec)) for p, spec, params in requests]
    while engine.busy:
        engine.step()
        engine.check_integrity()
    assert all(sequence.error is None for sequence in found), [s.error for s in found]
    return [sequence.output for sequence in found]


@pytest.mark.parametrize("kind", KINDS)
def test_any_batch(kind: str) -> None:
    ops = list(IMPLEMENTATIONS)[-1]  # the quickest there is; others are held to it elsewhere
    rng = random.Random(kind)
    kinds = [
        SamplingParams(max_tokens=13, seed=3),
        SamplingParams(max_tokens=13, temperature=0.8, top_p=0.9, seed=5),
        SamplingParams(max_tokens=13, temperature=1.0, frequency_penalty=0.3, seed=6),
    ]
    requests = [
        ([rng.randrange(96) for _ in range(rng.randrange(1, 40))], spec, kinds[i % 3])
        for i, spec in enumerate(SPECS[kind])
    ]
    expected = [run(kind, ops, [request], pages=40, nodes=256)[0] for request in requests]
    for pages, nodes in ((100, 512), (12, 30)):
        assert run(kind, ops, requests, pages=pages, nodes=nodes) == expected
    causal = ("plain", "ngram", "self-diffuse")
    filled = [o for o, spec in zip(expected, SPECS[kind], strict=True) if spec not in causal]
    assert not any(MASK in output for output in filled)
    slow, fast = requests[0], (requests[0][0], SPECS[kind][1], requests[0][2])
    if fast[1].startswith("verify"):
        assert run(kind, ops, [fast], pages=40, nodes=512) == [expected[0]]
    exact = (slow[0], "self-diffuse", slow[2])
    if "self-diffuse" in SPECS[kind]:
        plain = run(kind, ops, [(slow[0], "plain", slow[2])], pages=40, nodes=256)
        assert run(kind, ops, [exact], pages=40, nodes=256) == plain
