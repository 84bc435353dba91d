"""Estimates the speed-up of a draft head: tokens per pass against the cost of passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outstride.errors import OutOfMemory
from outstride.policy.cost_model import CostModel

if TYPE_CHECKING:
    from outstride.llm import LLM


@dataclass(frozen=True, slots=True)
class SpeedupEstimate:
    """The best chain for a cost curve, one request at a time."""

    draft_tokens: int
    """Best draft length; 0: drafting does not pay."""
    tokens_per_pass: float
    speedup: float
    """Over decoding one token at a time."""


def estimate_speedup(
    by_depth: Sequence[float],
    overhead: float,
    seconds: Mapping[int, float],
    masks_per_node: float = 0.0,
) -> SpeedupEstimate:
    """Estimates from how often the first 1, 2, … draft tokens are accepted, and the seconds of
    passes by nodes.

    overhead: cost of a draft, as a share of a pass over one node. masks_per_node: mask nodes for the
    next draft that each node has, per draft token.
    """

    def nodes(draft_tokens: int) -> int:
        return round((draft_tokens + 1) * (1 + masks_per_node * draft_tokens))

    curve = CostModel(seconds, frozen=True).curve(nodes(len(by_depth)))
    best, tokens = SpeedupEstimate(0, 1.0, 1.0), 1.0
    for draft_tokens, share in enumerate(by_depth, start=1):
        tokens += share
        speedup = tokens * curve[1] / (curve[nodes(draft_tokens)] + overhead * curve[1])
        if speedup > best.speedup:
            best = SpeedupEstimate(draft_tokens, tokens, speedup)
    return best


def cost_curve(llm: LLM) -> dict[int, float]:
    """Seconds of the model's passes on this machine, by number of nodes."""
    found = llm.engine.profile()
    if found is None:
        raise OutOfMemory("too few pages to measure passes; give the engine a larger KV cache")
    return found.knots
