"""What passes cost before any was timed: shapes of the cost curve by kind of backend.

A shape has the cost of a pass over several nodes in passes over one node. `docs/auto.md` says which
figures were measured and which are assumptions. Where they are uncertain they are on the low side: a
draft that looks cheap is tried, and the step corrects the curve. One that looks expensive is never
tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from outstride.policy.config import AutoConfig
from outstride.policy.cost_model import CostModel, DraftSource, PrefillCost

SIZES = (1, 2, 4, 8, 9, 16, 17, 32, 64)
"""Numbers of nodes: powers of two, and both sides of each edge of a kernel tile."""


@dataclass(frozen=True, slots=True)
class CostShape:
    """The cost of passes of one kind of backend, in passes over one node."""

    nodes: tuple[float, ...]
    """By `SIZES`."""
    prefill: tuple[float, float, float]
    """What a prefill chunk adds: per node, per pair of a node and a cached token, per cached token."""

    def cost_model(
        self,
        config: AutoConfig,
        stored: Mapping[int, float] = MappingProxyType({}),
        drafts: Mapping[DraftSource, float] | None = None,
    ) -> CostModel:
        """A cost model that begins with this shape, or with what another process has made of it.

        If nothing is stored, the first pass gives it a scale.
        """
        shape = dict(zip(SIZES, self.nodes, strict=True))
        cost = CostModel(shape, config=config, stored=stored, drafts=drafts)
        prefill = PrefillCost(*self.prefill, config=config)
        prefill.scale(cost.curve(1)[1])
        cost.set_prefill(prefill, follows=True)
        return cost


SHAPES: dict[str, CostShape] = {
    "amx": CostShape((1, 1.02, 1.1, 1.25, 1.3, 1.6, 1.7, 2.6, 4.6), (0.05, 2e-5, 1e-4)),
    "avx512 int4": CostShape((1, 1.06, 1.25, 1.7, 1.85, 2.7, 2.85, 5, 9.5), (0.12, 5e-5, 2e-4)),
    "avx512": CostShape((1, 1.03, 1.1, 1.45, 1.55, 2.15, 2.2, 3.5, 6.5), (0.085, 4e-5, 1.5e-4)),
    "avx-vnni": CostShape((1, 1.05, 1.25, 1.9, 2.1, 3.2, 3.4, 6, 11.5), (0.15, 6e-5, 1.7e-4)),
    "neon": CostShape((1, 1.05, 1.25, 1.9, 2.1, 3.2, 3.4, 6, 11.5), (0.15, 6e-5, 1.7e-4)),
    "avx2": CostShape((1, 1.08, 1.4, 2.4, 2.7, 4.4, 4.8, 8.8, 17.5), (0.25, 1.2e-4, 1.7e-4)),
    "portable": CostShape((1, 1.7, 3.2, 6.4, 7.2, 12.8, 13.6, 26, 52), (0.8, 5e-4, 1e-5)),
    "reference": CostShape((1, 1, 1.03, 1.07, 1.1, 1.12, 1.9, 2, 4), (0.048, 2e-5, 1.3e-4)),
}
"""By the words of a build, all of which must begin a word of it; the first one that fits counts."""
OTHER = "avx2"
"""The shape of CPU builds that are not listed."""


def prior_of(build: str) -> CostShape | None:
    """The shape for a model's build; None for GPUs, which differ too much from each other.

    There passes are measured, which also captures CUDA graphs that the first answer needs.
    """
    words = build.lower().replace("avxvnni", "avx-vnni").split()
    if "cuda" in words:
        return None
    for kind, shape in SHAPES.items():
        if all(any(word.startswith(part) for word in words) for part in kind.split()):
            return shape
    return SHAPES[OTHER]
