"""Masked toys of every kind, and specs of every method for them."""

from __future__ import annotations

from typing import Any

from outstride import registry
from outstride.core.contracts import CAUSAL, FULL, AttentionPattern, MaskedSpec
from outstride.core.params import SamplingParams
from outstride.core.proposal import TARGET
from tests.conformance.harness import MASK

BLOCK = AttentionPattern(block=4)

KINDS: dict[str, dict[str, Any]] = {
    "blocks": {"vision": BLOCK, "masking": MaskedSpec(MASK, 4, shifted=False, causal=False)},
    "shifted blocks": {"vision": BLOCK, "masking": MaskedSpec(MASK, 4, shifted=True, causal=True)},
    "canvas": {"vision": FULL, "masking": MaskedSpec(MASK, None, shifted=False, causal=False)},
    "shifted canvas": {
        "vision": FULL,
        "masking": MaskedSpec(MASK, None, shifted=True, causal=False),
    },
    "in turn": {"vision": CAUSAL, "masking": MaskedSpec(MASK, None, shifted=False, causal=True)},
    "sets": {"vision": CAUSAL, "masking": MaskedSpec(MASK, 4, shifted=False, causal=True)},
    "gated": {
        "vision": CAUSAL,
        "masking": MaskedSpec(MASK, 4, True, causal=True, uses_adapter=True),
    },
}
"""Attention patterns: in blocks, full, or causal, with masks that see each other or not."""

VARIANTS = {
    "steps": [
        "steps",
        "steps:count=2,order=margin,block=3",
        "steps:order=entropy",
        "steps:order=random",
        "steps:order=confidence",
    ],
    "verify": [
        "verify",
        "verify:ahead=2,count=2,order=margin,block=3",
        "verify:order=random",
        "verify:order=confidence",
    ],
    "threshold": ["threshold:threshold=0.2", "threshold:threshold=0.25,block=5"],
    "factor": ["factor:factor=1.9", "factor:factor=1.6,block=3"],
    "entropy-bound": ["entropy-bound:bound=3", "entropy-bound:bound=2,block=3"],
    "dilated": ["dilated", "dilated:base=3,min_prob=0.1,block=6"],
    "leap": ["leap:anchor=0.25,relaxed=0.15,radius=2", "leap:anchor=0.3,relaxed=0.1,block=6"],
    "credit": [
        "credit:threshold=0.25",
        "credit:threshold=0.3,weight=2,decay=0.9,power=1,block=6",
    ],
    "gap": ["gap:early=1,middle=0.5,late=0.2", "gap:early=0.7,count=2,block=3"],
    "adaptive-block": [
        "adaptive-block:threshold=0.2,shortest=2,block=6",
        "adaptive-block:threshold=0.25,delimiters=9+17,sure=0.1,block=8",
    ],
    "refine": [
        "refine:threshold=0.2,latent=2,blend=0.3",
        "refine:threshold=0.3,tokens=3,latent=5,calm=0.6,still=0.5,block=6",
    ],
    "guided": [
        "guided:model=draft",
        "guided:model=draft,weight=0.8,block=3",
        "guided:model=draft,agree=true",
    ],
    "any-subset": ["any-subset", "any-subset:order=random,block=4"],
    "filter": ["filter:from=filter", "filter:from=filter,threshold=0.5,block=5"],
    "pipeline": [
        "pipeline:threshold=0.2",
        "pipeline:threshold=0.15,depth=2,start=0.5,due=0.8,penalty=0.01,block=5",
    ],
    "regex": ["regex:pattern=[a-w]*,threshold=0.2", "regex:pattern=([ab]{1,3}|[c-w])*,block=3"],
}

CACHED = [
    "threshold:threshold=0.2,block=5,cache=prefix",
    "factor:factor=1.9,block=5,cache=dual",
    "entropy-bound:bound=3,block=5,cache=stable",
    "dilated:block=6,cache=dual,refresh=2",
    "leap:anchor=0.25,relaxed=0.15,block=5,cache=stable,refresh=3",
    "credit:threshold=0.25,block=5,cache=prefix,refresh=2",
    "filter:from=filter,block=5,cache=dual",
]
"""Methods that reuse stale KV, for models with full attention."""


def masked_specs() -> list[str]:
    """Specs of every registered method that fills in masks; one missing above is tried as it is."""
    specs: list[str] = []
    for entry in registry.entries():
        if TARGET in entry.drafter.masked_models:
            specs += VARIANTS.get(entry.name, [entry.name])
    return specs


def suits(spec: str, kind: str) -> bool:
    """Whether a method works with a model of this kind."""
    values = KINDS[kind]
    return (
        registry.build(spec).drafter.unsupported_reason(values["vision"], values["masking"]) is None
    )


PAIRS = [(spec, kind) for spec in masked_specs() for kind in KINDS if suits(spec, kind)]

SAMPLED = SamplingParams(max_tokens=14, temperature=0.8, seed=11)
