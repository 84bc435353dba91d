"""`Canvas`: the drafter of nearly all methods for masked models. It lays out masks; acceptors settle.

What is drafted is always the same: the settled tokens that the model has not read, and behind them
the positions in work, masks where nothing is settled. Methods differ in what they settle, so most of
them are this class under another name, with another acceptor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outstride.core.canvas import Memory, Sheet, recall
from outstride.core.contracts import CAUSAL, FULL, Demand, Drafter, Masking, Rounds, Vision
from outstride.core.graph import Mixture, TokenGraph, block, chain, empty
from outstride.core.proposal import TARGET, Proposal, Scores, Verdict, Wants
from outstride.core.sequence import View

CACHES = ("none", "prefix", "dual", "stable")
"""What a model that sees the whole canvas may reuse although it is stale: nothing; what lies before
the block in work; all that lies outside of it; all settled positions."""


class Canvas(Drafter):
    """Lays out the block in work. Options of all methods:

    block: how many positions are filled in together (0: as many as the model was made for).
    cache: what is reused although it is stale, see `CACHES`; only where the whole canvas is seen.
    refresh: after how many passes all of it is computed anew (0: whenever a block begins).
    """

    fills = (TARGET,)
    wants = Wants(nodes=())
    asks = Wants(logprobs=0)
    """What acceptors want to know of each open position."""

    def __init__(self, *, block: int = 0, cache: str = "none", refresh: int = 0) -> None:
        if block < 0 or refresh < 0 or cache not in CACHES:
            raise ValueError(f"needs block >= 0, refresh >= 0 and cache one of {', '.join(CACHES)}")
        self.block = block
        self.cache = cache
        self.refresh = refresh

    def fits(self, vision: Vision, masking: Masking | None) -> str | None:
        full = vision.block is not None and masking is not None and masking.block is None
        if self.cache != "none" and not full:
            return f"cache={self.cache} is for models that see a whole canvas; its cache is exact"
        if vision == CAUSAL and masking is not None and masking.shifted and not masking.gated:
            return "with causal attention, shifted logits cannot be scored out of order"
        return None

    def entries(self, limit: int, vision: Vision) -> int:
        if vision.block is None:
            return limit
        if vision == FULL:
            return 2 * limit if self.cache != "none" else limit
        return -(-limit // vision.block) * vision.block

    # --- what a pass is to compute -----------------------------------------------------------------

    def front(self, view: View) -> range:
        """The block in work."""
        return Sheet(view).block(self.block)

    def places(self, view: View) -> list[Sequence[int]]:
        """Positions to compute, in blocks of which each sees those before it."""
        sheet = Sheet(view)
        if view.block() is None:
            front = self.front(view)
            return [front if gated(view) else sheet.open(front)]
        if self.cache == "none" or self._whole(view):
            return [sheet.window()]
        front, window = self.front(view), sheet.window()
        if self.cache == "prefix":
            found = set(window[front.start :])
        elif self.cache == "dual":
            found = set(front)
        else:
            found = {*sheet.open(window), *(p for p in recall(view).recent if p < window.stop)}
        found.update(p - self._offset(view) for p in self.scored(view))
        return [sorted(found)]

    def scored(self, view: View) -> list[int]:
        """Positions about which the acceptor wants to hear."""
        return Sheet(view).open(self.front(view))

    def input(self, view: View, position: int, mask: int) -> int | Mixture:
        """What stands at a position."""
        token = view.token_at(position)
        return mask if token is None else int(token)

    def _whole(self, view: View) -> bool:
        """Whether all of a full canvas is to be computed."""
        memory = recall(view)
        known = len(view.kept()) >= Sheet(view).window().stop
        old = bool(self.refresh) and memory.age >= self.refresh
        return not known or old or memory.front != self.front(view).start

    def _offset(self, view: View) -> int:
        masking = view.masking()
        return int(masking is not None and masking.shifted)

    # --- the contract -----------------------------------------------------------------------------

    def demand(self, view: View) -> Demand:
        size = sum(len(places) for places in self.places(view)) + len(self._ready(view))
        return Demand(least=size, most=size, gain=1.0)

    def _ready(self, view: View) -> list[int]:
        """Tokens beyond a gap that a causal model can read for good, in the order of settling."""
        if view.block() is not None or gated(view):
            return []
        read = {*view.kept(), *view.order}  # what it read before, it reads again as it did
        stop = Sheet(view).stop
        return [p for p in sorted(view.canvas) if p not in read and p < stop]

    def propose(self, view: View, room: int) -> Rounds:
        yield from ()
        given, offset = view.given(), self._offset(view)
        if room <= 0:
            return Proposal(given, len(given), offset=offset, wants=Wants(nodes=()))
        if ready := self._ready(view):
            given = given.grow(chain([view.canvas[p] for p in ready], positions=ready))
        graph = given
        for places in self.places(view):
            graph = (
                graph.grow(self._masks(view, places)) if len(graph) else self._masks(view, places)
            )
        wants = replace(self.asks, nodes=nodes_for(graph, self.scored(view), offset))
        return Proposal(graph, len(given), offset=offset, wants=wants)

    def _masks(self, view: View, places: Sequence[int]) -> TokenGraph:
        masking = view.masking()
        if masking is None or not places:
            return empty()
        inputs = [self.input(view, p, masking.token) for p in places]
        if view.block() is None and masking.block is None:  # masks see those before them
            graph = empty()
            for entry, place in zip(inputs, places, strict=True):
                graph = graph.grow(block([entry], positions=[place]))
            return graph
        return block(inputs, positions=places)

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> Memory:
        memory = recall(view)
        if len(proposal.graph) == proposal.given:
            return memory
        # The verdict is committed already: what the pass worked on is read off its own graph.
        positions = proposal.graph.positions
        whole = int(positions.max()) + 1 == len(positions)
        first = int(positions[scores.nodes].min()) + proposal.offset if len(scores.nodes) else -1
        return memory.after(verdict, self._start(view, first), whole=whole)

    def _start(self, view: View, position: int) -> int:
        """Where a block of a full canvas begins."""
        size = self.block or view.limit - view.prompt_length
        return position - (position - view.prompt_length) % size


def gated(view: View) -> bool:
    """Whether tokens beyond a gap are not read for good until it is closed."""
    masking = view.masking()
    return masking is not None and masking.gated


def nodes_for(graph: TokenGraph, positions: Sequence[int], offset: int) -> tuple[int, ...]:
    """The nodes that score these positions; of several at one place, the last."""
    at = {int(p): node for node, p in enumerate(graph.positions)}
    return tuple(sorted(at[p - offset] for p in positions if p - offset in at))
