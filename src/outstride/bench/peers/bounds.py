"""Bounds of the comparison with llama.cpp: how much faster than its own build we must be.

They depend on the instruction set, because our lead does, and on the size of the model: large models
wait for memory, which is the same for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outstride.bench.comparison_rows import Bound
from outstride.models.load import weight_count

if TYPE_CHECKING:
    from outstride.llm import LLM

LARGE = 500_000_000
"""Weights from which a model counts as large."""


@dataclass(frozen=True, slots=True)
class PeerBounds:
    """Largest ratios of times by nodes, smallest ratios of speeds by length; None: no bound."""

    passes: Mapping[int, float]
    prompts: Mapping[int, float] = field(default_factory=dict)
    sequences: float | None = None
    long: float | None = None
    greedy: float | None = None
    requests: float | None = None
    sampled: float | None = None
    start: bool = False
    """Whether start-up time and peak memory are bounded."""


GENERAL = PeerBounds(
    passes={1: 0.85, 8: 0.35, 16: 0.31},
    prompts={1024: 1.0},
    sequences=0.31,
    long=1.0,
    greedy=1.2,
    requests=2.7,
    sampled=0.92,
    start=True,
)
AVX2 = PeerBounds(
    passes={1: 0.70, 4: 0.42, 8: 0.35, 16: 0.36},
    prompts={1024: 2.0, 4096: 1.7, 8185: 1.5},
    long=1.0,
    greedy=1.2,
    requests=2.5,
    sampled=0.92,
    start=True,
)
LARGE_MODEL = PeerBounds(passes={1: 0.70, 8: 0.40})


def our_build(llm: LLM) -> str:
    """Instruction set and formats that our passes run with, such as `cpu avx2 int8, cache int8`."""
    return str(getattr(getattr(llm.model, "ops", None), "name", ""))


def bounds_of(llm: LLM) -> PeerBounds:
    """The bounds for a model on the instruction set that it runs with."""
    config = getattr(llm.model, "config", None)
    if config is not None and weight_count(config) >= LARGE:
        return LARGE_MODEL
    return AVX2 if {"avx2", "avx-vnni"} & set(our_build(llm).split()) else GENERAL


def at_most(limit: float | None) -> Bound | None:
    """A bound for a ratio of times."""
    return None if limit is None else Bound(limit)


def at_least(limit: float | None) -> Bound | None:
    """A bound for a ratio of speeds."""
    return None if limit is None else Bound(limit, at_most=False)
