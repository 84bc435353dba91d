"""`verify`: several steps of `steps` in one pass, over canvases as they will be if predictions hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from outstride.core.contracts import AttentionPattern, Demand, MaskedSpec, Rounds
from outstride.core.graph import NodeId, Position, TokenGraph, TokenId, block, nodes_for
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sequence import View
from outstride.diffusion.canvas import CanvasState, random_priority, recall, spec_of
from outstride.diffusion.steps import ASKS
from outstride.diffusion.unmasker import (
    Prediction,
    Unmasker,
    admissible,
    predictions,
    priority,
    ranked,
)
from outstride.registry import method


def canvas_below(
    proposal: Proposal, parent: NodeId, positions: Sequence[int], inputs: Sequence[int]
) -> list[NodeId]:
    """The nodes of the canvas below a node that holds these inputs; empty if there is none."""
    graph = proposal.graph
    below = np.flatnonzero(graph.parents[proposal.given :] == parent) + proposal.given
    for number in dict.fromkeys(graph.blocks[below].tolist()):
        nodes = below[graph.blocks[below] == number]
        same = np.array_equal(graph.positions[nodes], positions)
        if same and np.array_equal(graph.tokens[nodes], inputs):
            return [NodeId(int(node)) for node in nodes]
    return []


@method("verify", family="diffusion")
class VerifyUnmasker(Unmasker):
    """Takes several steps of `steps` in one pass, and returns the very same text.

    Next to the canvas as it stands, a pass scores it as it will stand after one, two, up to `ahead`
    more steps, if the predictions of the last pass hold. Each step that turns out as assumed is
    followed by the next one. A block that is assumed to be complete is followed by the masks of the
    next.

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
        self.ahead = ahead
        self.count = count
        self.order = order
        self.asks = ASKS[order]

    def unsupported_reason(
        self, vision: AttentionPattern, masking: MaskedSpec | None
    ) -> str | None:
        if vision.block is None:
            return "with causal attention, KV depends on the order of settling"
        return super().unsupported_reason(vision, masking)

    # --- the canvases of a pass ---------------------------------------------------------------------

    def demand(self, view: View) -> Demand:
        size = len(CanvasState(view).window())
        return Demand(min_nodes=size, max_nodes=size * (2 + self.ahead), gain=float(self.ahead))

    def propose(self, view: View, budget: int) -> Rounds:
        masked, canvas = spec_of(view), CanvasState(view)
        if budget <= 0 or masked is None:
            return (yield from super().propose(view, budget))
        given, offset = view.given(), self._offset(view)
        root = NodeId(len(given) - 1)
        graph, nodes = self._attach(given, root, canvas, masked.token, offset)
        for later in self._future(view, canvas):
            here, grown, at = canvas.window(), graph, root
            if crossed := later.window().start != here.start:
                # The block is complete: its KV may be kept, and the next block hangs below it.
                whole = block(
                    [t for p in here if (t := later.token(p)) is not None], positions=here
                )
                grown = graph.grow(whole, at=root)
                at = NodeId(len(grown) - 1)
            grown, fresh = self._attach(grown, at, later, masked.token, offset)
            if len(grown) - len(given) > budget:
                break
            graph, nodes, canvas = grown, (*nodes, *fresh), later
            if crossed:
                break
        wants = replace(self.asks, nodes=tuple(sorted(set(nodes))))
        return Proposal(graph, len(given), offset=offset, wants=wants)

    def _attach(
        self, graph: TokenGraph, at: NodeId, canvas: CanvasState, mask: int, offset: int
    ) -> tuple[TokenGraph, tuple[int, ...]]:
        """The graph with a canvas below a node, and the nodes that score its open positions."""
        window = canvas.window()
        inputs = [mask if (t := canvas.token(p)) is None else t for p in window]
        own = block(inputs, positions=window)
        grown = graph.grow(own, at=at)
        positions = canvas.open(self._scored_range(canvas))
        nodes = tuple(n + len(graph) for n in nodes_for(own, positions, offset))
        if at >= 0 and any(p - offset == window.start - 1 for p in positions):
            nodes = (int(at), *nodes)  # the token before a shifted block scores its first position
        return grown, nodes

    def _scored_range(self, canvas: CanvasState) -> range:
        """The active block and, on a full canvas, the next one: predictions for later steps."""
        front, window = canvas.block(self.block), canvas.window()
        return range(front.start, min(front.stop + len(front), window.stop))

    def _future(self, view: View, canvas: CanvasState) -> list[CanvasState]:
        """The canvases of the next steps if the predictions of the last pass hold."""
        predicted: Mapping[int, tuple[int, float]] = recall(view).note or {}
        found: list[CanvasState] = []
        while len(found) < self.ahead and view.grammar is None:
            positions = [p for p in canvas.open(canvas.block(self.block)) if p in predicted]
            if len(positions) < len(canvas.open(canvas.block(self.block))):
                break
            if self.order == "random":
                settled = canvas.num_settled
                positions.sort(key=lambda p: (-random_priority(view, settled, p), p))
            else:
                positions.sort(key=lambda p: (-predicted[p][1], p))
            canvas = canvas.with_tokens({p: predicted[p][0] for p in positions[: self.count]})
            if canvas.done:
                break
            found.append(canvas)
        return found

    # --- the verdict --------------------------------------------------------------------------------

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Prediction]
    ) -> list[Prediction]:
        return self._step(view, scores, CanvasState(view), found)

    def _step(
        self, view: View, scores: Scores, canvas: CanvasState, found: list[Prediction]
    ) -> list[Prediction]:
        """The predictions that `steps` would settle on a canvas."""
        positions = canvas.open(canvas.block(self.block))
        here = [p for p in found if p.position in positions]
        return ranked(here, scores, self.order, view, canvas.num_settled)[: self.count]

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        """Takes a step on the canvas as it is, then on each canvas that equals the outcome."""
        keep = [NodeId(node) for node in range(proposal.given)]
        canvas, root, mask = CanvasState(view), proposal.root, spec_of(view)
        scored, settled = set(scores.nodes.tolist()), list[Prediction]()
        found = list[Prediction]()
        while scored and mask is not None:
            window = canvas.window()
            inputs = [mask.token if (t := canvas.token(p)) is None else t for p in window]
            below = canvas_below(proposal, root, window, inputs)
            if not below:
                break
            found = predictions(proposal, scores, [n for n in (root, *below) if n in scored])
            found = [replace(p, forced=True) if p.node == root else p for p in found]
            chosen = self._step(view, scores, canvas, found)
            if view.grammar is not None:
                chosen = admissible(view, found, chosen)
            settled += chosen
            canvas = canvas.with_tokens({p.position: p.token for p in chosen})
            if canvas.done or view.grammar is not None:
                break
            if canvas.window().start != window.start:
                filled = [t for p in window if (t := canvas.token(p)) is not None]
                whole = canvas_below(proposal, root, window, filled)
                if not whole:
                    break
                keep += whole
                root = whole[-1]
        return Verdict(
            settled={Position(p.position): TokenId(p.token) for p in settled},
            keep=tuple(keep),
            nodes={Position(p.position): p.node for p in settled},
            note=self._open_predictions(view, scores, canvas, found)
            if scored
            else recall(view).note,
        )

    def _open_predictions(
        self, view: View, scores: Scores, canvas: CanvasState, found: list[Prediction]
    ) -> dict[int, tuple[int, float]]:
        """Token and priority of each prediction whose position is still open."""
        still = [p for p in found if canvas.token(p.position) is None]
        settled = canvas.num_settled
        return {
            p.position: (p.token, priority(p, scores, self.order, view, settled)) for p in still
        }
