"""Any-order models check their own parallel guesses, and keep their joint distribution."""

from __future__ import annotations

from outstride.core.canvas import Sheet, chance_at, recall
from outstride.core.contracts import Demand, Masking, Rounds, Vision
from outstride.core.graph import NodeId, chain
from outstride.core.proposal import Proposal, Wants
from outstride.core.sequence import View
from outstride.draft.canvas import Canvas
from outstride.registry import method


@method("any-subset", family="diffusion", acceptor="any-subset")
class AnySubset(Canvas):
    """Guesses all masks at once, then checks the guesses one behind the other in a single pass.

    One pass draws every position of the window from what is settled alone. The next reads those draws
    as a chain, in the order of settling, with a mask beside each: its row is the distribution given
    all draws before it. The rule of rejection sampling keeps a run of them and mends the first that
    fails. The first draw always holds, so there are never more passes than tokens. `order` is left (to
    right) or random.

    Paper: any-subset speculative decoding, ASSD (Guo and Ermon, 2025)
    Exactness: distribution of the model's own one-by-one sampling in the same order
    Needs: an any-order model with causal attention
    Cost per step: in turn, one window of masks, and up to twice as many nodes
    """

    asks = Wants(logprobs=0, rows=True)

    def __init__(self, *, order: str = "left", block: int = 8) -> None:
        super().__init__(block=block)
        if order not in ("left", "random") or block < 1:
            raise ValueError("needs order left or random, and block >= 1")
        self.order = order

    def fits(self, vision: Vision, masking: Masking | None) -> str | None:
        if vision.block is not None or masking is None or masking.block is not None:
            return "it needs causal attention and masks that do not see each other"
        return super().fits(vision, masking)

    def _sequence(self, view: View) -> list[int]:
        """Open positions in the order of settling."""
        sheet = Sheet(view)
        places = sheet.open(sheet.block(self.block))
        if self.order == "random":
            places.sort(key=lambda p: (chance_at(view, 0, p), p))
        return places

    def demand(self, view: View) -> Demand:
        drafts = recall(view).note
        size = len(self._sequence(view)) if drafts is None else 2 * len(drafts.tokens)
        size += len(self._ready(view))
        return Demand(least=size, most=size, gain=1.0)

    def propose(self, view: View, room: int) -> Rounds:
        masking, drafts = view.masking(), recall(view).note
        if room <= 0 or masking is None:
            return (yield from super().propose(view, 0))
        given = view.given()
        if ready := self._ready(view):
            given = given.grow(chain([view.canvas[p] for p in ready], positions=ready))
        root, graph, nodes = NodeId(len(given) - 1), given, []
        if drafts is None:
            for place in self._sequence(view):
                nodes.append(len(graph))
                graph = graph.grow(chain([masking.token], place, probe=True), at=root)
        else:
            above = root
            for place, token in drafts.tokens.items():
                nodes.append(len(graph))
                graph = graph.grow(chain([masking.token], place, probe=True), at=above)
                graph = graph.grow(chain([token], place), at=above)
                above = NodeId(len(graph) - 1)
        wants = Wants(nodes=tuple(nodes), logprobs=0, rows=True)
        return Proposal(graph, len(given), offset=0, wants=wants)
