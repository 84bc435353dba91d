"""What a trained part will give before it is deployed: tokens per pass against what passes cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outstride.core.proposal import TARGET
from outstride.engine.cost import Cost
from outstride.engine.measuring import measure
from outstride.errors import OutOfMemory

if TYPE_CHECKING:
    from outstride.llm import LLM


@dataclass(frozen=True, slots=True)
class Forecast:
    """The best chain that the curve allows, one request at a time."""

    guesses: int
    """How many to draft; 0: drafting does not pay here."""
    tokens_per_pass: float
    speedup: float
    """Over decoding one token at a time."""


def forecast(
    by_depth: Sequence[float],
    overhead: float,
    seconds: Mapping[int, float],
    carried: float = 0.0,
) -> Forecast:
    """From how often the first 1, 2, … guesses are right, and the seconds of passes by nodes.

    overhead: what a draft costs, as a share of a pass over one node.
    carried: nodes for the next draft that each node has with it, for each guess.
    """

    def nodes(guesses: int) -> int:
        return round((guesses + 1) * (1 + carried * guesses))

    curve = Cost(seconds, frozen=True).curve(nodes(len(by_depth)))
    best, tokens = Forecast(0, 1.0, 1.0), 1.0
    for guesses, share in enumerate(by_depth, start=1):
        tokens += share
        speedup = tokens * curve[1] / (curve[nodes(guesses)] + overhead * curve[1])
        if speedup > best.speedup:
            best = Forecast(guesses, tokens, speedup)
    return best


def curve_of(llm: LLM) -> dict[int, float]:
    """What passes of a model cost on this machine, by number of nodes."""
    passes = llm.engine.passes
    found = measure(passes.models[TARGET], passes.pools[TARGET], llm.engine.scheduler.limits.nodes)
    if found is None:
        raise OutOfMemory("the cache has no room to measure passes in; give the engine more pages")
    return found.knots
