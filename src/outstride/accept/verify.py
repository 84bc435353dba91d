"""One step after the other, for as long as they were foreseen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from outstride.accept.unmask import Guess, Unmask, admissible, guesses, ranked, value_of
from outstride.core.canvas import Sheet, recall
from outstride.core.graph import NodeId, Position, TokenId
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sequence import View
from outstride.registry import acceptor


def canvas_below(
    proposal: Proposal, parent: NodeId, places: Sequence[int], inputs: Sequence[int]
) -> list[NodeId]:
    """The nodes of the canvas that hangs below a node and holds these inputs, if there is one."""
    graph = proposal.graph
    below = np.flatnonzero(graph.parents[proposal.given :] == parent) + proposal.given
    for block in dict.fromkeys(graph.blocks[below].tolist()):
        nodes = below[graph.blocks[below] == block]
        same = np.array_equal(graph.positions[nodes], places)
        if same and np.array_equal(graph.tokens[nodes], inputs):
            return [NodeId(int(node)) for node in nodes]
    return []


@acceptor("verify")
class Verify(Unmask):
    """Takes a step of `steps` on the canvas as it is, then on each canvas that equals the outcome."""

    def __init__(self, *, count: int, order: str, block: int) -> None:
        super().__init__()
        self.count = count
        self.order = order
        self.block = block

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Guess]
    ) -> list[Guess]:
        sheet = Sheet(view)
        return self._step(view, scores, sheet, found)

    def _step(self, view: View, scores: Scores, sheet: Sheet, found: list[Guess]) -> list[Guess]:
        """What `steps` would settle on a canvas."""
        places = sheet.open(sheet.block(self.block))
        here = [guess for guess in found if guess.position in places]
        return ranked(here, scores, self.order, view, sheet.clock)[: self.count]

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        keep = [NodeId(node) for node in range(proposal.given)]
        sheet, root, mask = Sheet(view), proposal.root, view.masking()
        scored, settled, found = set(scores.nodes.tolist()), list[Guess](), list[Guess]()
        while scored and mask is not None:
            window = sheet.window()
            inputs = [mask.token if (t := sheet.token(p)) is None else t for p in window]
            canvas = canvas_below(proposal, root, window, inputs)
            if not canvas:
                break
            found = guesses(proposal, scores, [n for n in (root, *canvas) if n in scored])
            found = [replace(g, forced=True) if g.node == root else g for g in found]
            chosen = self._step(view, scores, sheet, found)
            if view.grammar is not None:
                chosen = admissible(view, found, chosen)
            settled += chosen
            sheet = sheet.with_tokens({g.position: g.token for g in chosen})
            if sheet.done or view.grammar is not None:
                break
            if sheet.window().start != window.start:
                filled = [t for p in window if (t := sheet.token(p)) is not None]
                whole = canvas_below(proposal, root, window, filled)
                if not whole:
                    break
                keep += whole
                root = whole[-1]
        return Verdict(
            settled={Position(g.position): TokenId(g.token) for g in settled},
            keep=tuple(keep),
            nodes={Position(g.position): g.node for g in settled},
            note=self._foresight(view, scores, sheet, found) if scored else recall(view).note,
        )

    def _foresight(
        self, view: View, scores: Scores, sheet: Sheet, found: list[Guess]
    ) -> dict[int, tuple[int, float]]:
        """Guesses for what is still open, and how they rank."""
        still = [guess for guess in found if sheet.token(guess.position) is None]
        return {
            g.position: (g.token, value_of(g, scores, self.order, view, sheet.clock)) for g in still
        }
