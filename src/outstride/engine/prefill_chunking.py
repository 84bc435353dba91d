"""Chunked prefill: how much of a prompt a pass may compute while other requests decode.

The baseline of the decoding requests is what a pass took when the prompt arrived. While the prompt is
prefilled they go on, and each token that they add makes every pass longer, with or without a prefill
chunk. So small chunks do not simply protect them: the prefill then takes many passes, the passes grow
meanwhile, and in the end no slack is left for the chunks. Instead the remaining prefill is simulated,
to find the smallest bound on the time of a pass under which the whole prompt can be computed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from outstride.policy.cost_model import CostModel, Parts, PrefillCost, whole_tiles

SLOWDOWN, MAX_SLOWDOWN = 1.75, 4.0
"""How many times the baseline a pass may take while a prompt is prefilled, and the bound for prompts
that are so long that they need more. If more requests prefill than decode, the bound grows by that
ratio: then most of the waiting requests are the prefilling ones."""
MIN_CHUNK = 4
"""Nodes that a prefill chunk may have in any case."""
REPLAN_EVERY = 8
"""After this many chunks of a prompt, its bound is computed again."""
SIMULATED_CHUNKS, BISECTIONS = 12, 5
"""The parts in which the rest of a prompt is simulated, and the halvings of the search interval."""


@dataclass(frozen=True, slots=True)
class PrefillingRequest:
    """A request whose prompt is not computed yet."""

    id: int
    cached: int
    pending: int


@dataclass(frozen=True, slots=True)
class DecodingRequest:
    """A request that waits for its next token."""

    id: int
    nodes: int
    cached: int


class PrefillChunking:
    """Chooses the sizes of prefill chunks, pass by pass."""

    def __init__(self) -> None:
        self._oldest = -1
        self._cached_before: dict[int, int] = {}
        """Cached tokens of each decoding request when the oldest prefilling request began."""
        self._slowdowns: dict[int, tuple[int, float]] = {}
        """Of each prefilling request: its chunks so far, and the slowdown that it needs."""

    def begin(self, oldest: int) -> None:
        """Starts a pass. The baseline dates from when the oldest prefilling request began."""
        if oldest != self._oldest:
            self._oldest = oldest
            self._cached_before.clear()
            self._slowdowns.clear()

    def max_nodes(
        self,
        cost: CostModel,
        request: PrefillingRequest,
        chunks: Parts,
        decoding: Sequence[DecodingRequest],
        num_prefilling: int,
    ) -> int:
        """How many nodes this prompt may have in a pass with these chunks and decoding requests.

        The cost of a chunk grows with the cached part of its prompt: later chunks are smaller.
        """
        now_decoding = [(other.nodes, other.cached) for other in decoding]
        decoding_nodes = sum(nodes for nodes, _ in now_decoding)
        before = [(d.nodes, self._cached_before.setdefault(d.id, d.cached)) for d in decoding]
        # A pass with a prefill chunk cannot run ahead. That delay does not depend on its size.
        usual, now = (
            max(cost.decode_seconds(some), cost.prefill.flat) for some in (before, now_decoding)
        )
        count, slowdown = self._slowdowns.get(request.id, (0, SLOWDOWN))
        if count % REPLAN_EVERY == 0:
            growth = (
                cost.decode_seconds([(nodes, cached + 1) for nodes, cached in now_decoding]) - now
            )
            if count:  # answers grow faster where drafts are accepted
                growth = max(growth, (now - usual) / count)
            slowdown = needed_slowdown(cost.prefill.undisturbed, request, usual, now, growth)
        self._slowdowns[request.id] = count + 1, slowdown
        left = slowdown * max(1.0, num_prefilling / decoding_nodes) * usual - now
        left -= sum(cost.prefill.seconds(*chunk) for chunk in chunks)
        found = cost.prefill.max_nodes(left, request.cached)
        found = whole_tiles(decoding_nodes + sum(nodes for nodes, _ in chunks), found)
        return found if chunks else max(found, MIN_CHUNK)


def draft_budget(cost: CostModel, chunks: Parts, decoding: Parts, budget: int) -> int:
    """How many of `budget` nodes drafts may have in a pass that prefills, too.

    No more than the usual slowdown of decoding requests has time for. Otherwise requests whose drafts
    begin to be accepted during a prefill would wait for their own drafts as well.
    """
    left = SLOWDOWN * cost.usual_step - cost.decode_seconds(decoding)
    left -= sum(cost.prefill.seconds(*chunk) for chunk in chunks)
    nodes = sum(size for size, _ in decoding)
    curve = cost.curve(nodes + budget)
    return max(bisect_right(curve, curve[nodes] + left, nodes, nodes + budget + 1) - 1 - nodes, 0)


def needed_slowdown(
    prefill: PrefillCost, request: PrefillingRequest, usual: float, now: float, growth: float
) -> float:
    """The smallest slowdown of decoding requests under which a prompt can be prefilled to its end.

    usual, now: seconds of a pass without the prompt, when it arrived and now.
    growth: by how many seconds such a pass grows with each step.
    """
    low, high = SLOWDOWN, MAX_SLOWDOWN
    if _completes(prefill, request, low * usual, now, growth):
        return low
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        if _completes(prefill, request, middle * usual, now, growth):
            high = middle
        else:
            low = middle
    return high


def _completes(
    prefill: PrefillCost, request: PrefillingRequest, seconds: float, now: float, growth: float
) -> bool:
    """Whether a prompt can be prefilled to its end in passes that never take longer than this."""
    cached, left = float(request.cached), float(request.pending)
    part = left / SIMULATED_CHUNKS
    while left > 0.0:
        chunk = prefill.max_nodes(seconds - now, int(cached))
        if chunk < MIN_CHUNK:
            return False
        step = min(left, max(part, chunk))
        now += growth * step / chunk
        cached += step
        left -= step
    return True
