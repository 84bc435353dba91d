"""`MaskedBlockDrafter`: the proposals of all methods for masked models.

A proposal always holds the settled tokens that the model has not computed, and after them the active
block: masks where nothing is settled. Methods differ in which predictions they settle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outstride.core.contracts import (
    CAUSAL,
    FULL,
    AttentionPattern,
    Demand,
    Drafter,
    MaskedSpec,
    Rounds,
)
from outstride.core.graph import Mixture, TokenGraph, block, chain, empty, nodes_for
from outstride.core.proposal import TARGET, Proposal, Scores, Verdict, Wants
from outstride.core.sequence import View
from outstride.diffusion.canvas import CanvasMemory, CanvasState, block_of, recall, spec_of

CACHES = ("none", "prefix", "dual", "stable")
"""Which stale KV a model with full attention may reuse: none; that before the active block; all
outside of it; that of all settled positions."""


class MaskedBlockDrafter(Drafter):
    """Proposes the active block. Options of all methods:

    block: how many positions are filled in together (0: as many as the model was trained for).
    cache: which stale KV is reused, see `CACHES`; only for models with full attention.
    refresh: after how many passes all KV is computed anew (0: whenever a block begins).
    """

    masked_models = (TARGET,)
    wants = Wants(nodes=())
    asks = Wants(logprobs=0)
    """What the method's rule needs to know of each open position."""

    def __init__(self, *, block: int = 0, cache: str = "none", refresh: int = 0) -> None:
        if block < 0 or refresh < 0 or cache not in CACHES:
            raise ValueError(f"needs block >= 0, refresh >= 0 and cache one of {', '.join(CACHES)}")
        self.block = block
        self.cache = cache
        self.refresh = refresh

    def unsupported_reason(
        self, vision: AttentionPattern, masking: MaskedSpec | None
    ) -> str | None:
        full = vision.block is not None and masking is not None and masking.block is None
        if self.cache != "none" and not full:
            return (
                f"cache={self.cache} is for models with full attention; this one's cache is exact"
            )
        if (
            vision == CAUSAL
            and masking is not None
            and masking.shifted
            and not masking.uses_adapter
        ):
            return "with causal attention, shifted logits cannot be scored out of order"
        return None

    def kv_needed(self, limit: int, vision: AttentionPattern) -> int:
        if vision.block is None:
            return limit
        if vision == FULL:
            return 2 * limit if self.cache != "none" else limit
        return -(-limit // vision.block) * vision.block

    # --- what a pass computes ----------------------------------------------------------------------

    def front(self, view: View) -> range:
        """The active block."""
        return CanvasState(view).block(self.block)

    def positions(self, view: View) -> list[Sequence[int]]:
        """Positions to compute, in blocks of which each attends to those before it."""
        canvas = CanvasState(view)
        if block_of(view) is None:
            front = self.front(view)
            return [front if uses_adapter(view) else canvas.open(front)]
        if self.cache == "none" or self._whole(view):
            return [canvas.window()]
        front, window = self.front(view), canvas.window()
        if self.cache == "prefix":
            found = set(window[front.start :])
        elif self.cache == "dual":
            found = set(front)
        else:
            found = {*canvas.open(window), *(p for p in recall(view).recent if p < window.stop)}
        found.update(p - self._offset(view) for p in self.scored(view))
        return [sorted(found)]

    def scored(self, view: View) -> list[int]:
        """Positions whose predictions the rule wants."""
        return CanvasState(view).open(self.front(view))

    def input(self, view: View, position: int, mask: int) -> int | Mixture:
        """The input at a position: its settled token, or the mask."""
        tokens = view.tokens
        return tokens[position] if position < len(tokens) else view.canvas.get(position, mask)

    def _whole(self, view: View) -> bool:
        """Whether all of a full canvas is to be computed."""
        memory = recall(view)
        known = len(view.kept()) >= CanvasState(view).window().stop
        old = bool(self.refresh) and memory.age >= self.refresh
        return not known or old or memory.front != self.front(view).start

    def _offset(self, view: View) -> int:
        masked = spec_of(view)
        return int(masked is not None and masked.shifted)

    # --- the drafter's contract ---------------------------------------------------------------------

    def demand(self, view: View) -> Demand:
        size = sum(len(block) for block in self.positions(view)) + len(self._ready(view))
        return Demand(min_nodes=size, max_nodes=size, gain=1.0)

    def _ready(self, view: View) -> list[int]:
        """Settled positions after a gap whose KV a causal model can keep, in the order of settling."""
        if block_of(view) is not None or uses_adapter(view):
            return []
        known = {*view.kept(), *view.order}  # after a preemption they are computed in the old order
        stop = CanvasState(view).stop
        return [p for p in sorted(view.canvas) if p not in known and p < stop]

    def _given(self, view: View) -> TokenGraph:
        """The settled tokens to compute for good, those after a gap among them."""
        given = view.given()
        if ready := self._ready(view):
            given = given.grow(chain([view.canvas[p] for p in ready], positions=ready))
        return given

    def propose(self, view: View, budget: int) -> Rounds:
        yield from ()
        offset = self._offset(view)
        if budget <= 0:
            given = view.given()
            return Proposal(given, len(given), offset=offset, wants=Wants(nodes=()))
        graph = given = self._given(view)
        for positions in self.positions(view):
            masks = self._masks(view, positions)
            graph = graph.grow(masks) if len(graph) else masks
        wants = replace(self.asks, nodes=nodes_for(graph, self.scored(view), offset))
        return Proposal(graph, len(given), offset=offset, wants=wants)

    def _masks(self, view: View, positions: Sequence[int]) -> TokenGraph:
        masked = spec_of(view)
        if masked is None or not positions:
            return empty()
        inputs = [self.input(view, p, masked.token) for p in positions]
        if block_of(view) is None and masked.block is None:  # each mask attends to those before it
            graph = empty()
            for token, position in zip(inputs, positions, strict=True):
                graph = graph.grow(block([token], positions=[position]))
            return graph
        return block(inputs, positions=positions)

    def observe(
        self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict
    ) -> CanvasMemory:
        memory = recall(view)
        if len(proposal.graph) == proposal.given:
            return memory
        # The verdict is committed by now: the block of this pass is read off the pass's own graph.
        positions = proposal.graph.positions
        whole = int(positions.max()) + 1 == len(positions)
        first = int(positions[scores.nodes].min()) + proposal.offset if len(scores.nodes) else -1
        return memory.after(verdict, self._start(view, first), whole=whole)

    def _start(self, view: View, position: int) -> int:
        """Where the block of a full canvas that holds a position begins."""
        size = self.block or view.limit - view.prompt_length
        return position - (position - view.prompt_length) % size


def uses_adapter(view: View) -> bool:
    """Whether the active block goes through an adapter: tokens after a gap then stay in the block."""
    masked = spec_of(view)
    return masked is not None and masked.uses_adapter
