"""Steps ahead of time: canvases as they will be if the guesses hold, scored in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from outstride.core.canvas import Sheet, chance_at, recall
from outstride.core.contracts import Demand, Masking, Rounds, Vision
from outstride.core.graph import NodeId, TokenGraph, block
from outstride.core.proposal import Proposal
from outstride.core.sequence import View
from outstride.draft.canvas import Canvas, nodes_for
from outstride.draft.steps import ASKS
from outstride.registry import method


@method("verify", family="diffusion", acceptor="verify")
class Verify(Canvas):
    """Takes several steps of `steps` in one pass, and returns the very same text.

    Beside the canvas as it stands, a pass scores it as it will stand after one, two, up to `ahead`
    more steps, if the guesses of the last pass hold. Each step that turns out as assumed is followed
    by the next one. A block that is assumed to be complete is followed by the masks of the next.

    Paper: Free Draft-and-Verification, FreeDave (Wu and Zhang, 2025)
    Exactness: exact to steps, with the same count, order and block
    Needs: a masked model
    Cost per step: up to 1 + `ahead` blocks (on a full canvas: canvases)
    """

    def __init__(
        self, *, ahead: int = 4, count: int = 1, order: str = "steady", block: int = 0
    ) -> None:
        super().__init__(block=block)
        if ahead < 1 or count < 1 or order not in ASKS:
            raise ValueError(f"needs ahead >= 1, count >= 1 and order one of {', '.join(ASKS)}")
        self.foresight = ahead
        self.count = count
        self.order = order
        self.asks = ASKS[order]

    def fits(self, vision: Vision, masking: Masking | None) -> str | None:
        if vision.block is None:
            return "with causal attention, entries depend on the order of settling"
        return super().fits(vision, masking)

    def demand(self, view: View) -> Demand:
        size = len(Sheet(view).window())
        return Demand(least=size, most=size * (2 + self.foresight), gain=float(self.foresight))

    def propose(self, view: View, room: int) -> Rounds:
        masking, sheet = view.masking(), Sheet(view)
        if room <= 0 or masking is None:
            return (yield from super().propose(view, room))
        given, offset = view.given(), self._offset(view)
        root = NodeId(len(given) - 1)
        graph, nodes = self._hang(given, root, sheet, masking.token, offset)
        for later in self._future(view, sheet):
            here, grown, at = sheet.window(), graph, root
            if crossed := later.window().start != here.start:
                # The block is complete: it may be kept, and the next one hangs below it.
                whole = block(
                    [t for p in here if (t := later.token(p)) is not None], positions=here
                )
                grown = graph.grow(whole, at=root)
                at = NodeId(len(grown) - 1)
            grown, fresh = self._hang(grown, at, later, masking.token, offset)
            if len(grown) - len(given) > room:
                break
            graph, nodes, sheet = grown, (*nodes, *fresh), later
            if crossed:
                break
        wants = replace(self.asks, nodes=tuple(sorted(set(nodes))))
        return Proposal(graph, len(given), offset=offset, wants=wants)

    def _hang(
        self, graph: TokenGraph, at: NodeId, sheet: Sheet, mask: int, offset: int
    ) -> tuple[TokenGraph, tuple[int, ...]]:
        """A canvas below a node, and the nodes that score its open positions."""
        window = sheet.window()
        inputs = [mask if (t := sheet.token(p)) is None else t for p in window]
        own = block(inputs, positions=window)
        grown = graph.grow(own, at=at)
        places = sheet.open(self._wide(sheet))
        nodes = tuple(n + len(graph) for n in nodes_for(own, places, offset))
        if at >= 0 and any(p - offset == window.start - 1 for p in places):
            nodes = (int(at), *nodes)  # a shifted block's first place is scored by what precedes it
        return grown, nodes

    def _wide(self, sheet: Sheet) -> range:
        """The block in work and, on the canvas, the one behind it: guesses for the steps to come."""
        front, window = sheet.block(self.block), sheet.window()
        return range(front.start, min(front.stop + len(front), window.stop))

    def _future(self, view: View, sheet: Sheet) -> list[Sheet]:
        """How the canvas goes on if the guesses of the last pass hold."""
        guessed: Mapping[int, tuple[int, float]] = recall(view).note or {}
        found: list[Sheet] = []
        while len(found) < self.foresight and view.grammar is None:
            places = [p for p in sheet.open(sheet.block(self.block)) if p in guessed]
            if len(places) < len(sheet.open(sheet.block(self.block))):
                break
            if self.order == "random":
                clock = sheet.clock
                places.sort(key=lambda p: (-chance_at(view, clock, p), p))
            else:
                places.sort(key=lambda p: (-guessed[p][1], p))
            sheet = sheet.with_tokens({p: guessed[p][0] for p in places[: self.count]})
            if sheet.done:
                break
            found.append(sheet)
        return found
