"""A model that both continues text and fills in masks drafts for itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from outstride.core.contracts import Demand, Drafter, Masking, Rounds, Vision
from outstride.core.graph import NodeId, TokenGraph, block, chain
from outstride.core.proposal import Proposal, Scores, Verdict, Wants
from outstride.core.sampling import best
from outstride.core.sequence import View
from outstride.registry import method


@method("self-diffuse", family="diffusion drafting")
class SelfDiffuse(Drafter):
    """Masks behind every drafted token let the target guess, in one pass, what to draft next.

    A pass verifies the tokens of the draft like any other, and carries `length` masks below each of
    them. Below the last token that holds, they have been filled in already: that is the next draft.
    The text is that of plain decoding. `from` names the folder of a diffusion adapter, for models that
    know no masks by themselves; without it, the one that is shipped for the model.

    Paper: Set Block Decoding, SBD (Gat et al., 2025); WeDLM (Liu et al., 2025); gated LoRA as in
      Samragh et al. (2025)
    Exactness: exact
    Needs: a masked model that also decodes causally or a diffusion adapter
    Cost per step: up to `length` masks for each drafted token and for the last settled one
    """

    part = "diffusion-adapter"

    def __init__(self, *, length: int = 4, from_: str = "") -> None:
        if length < 2:
            raise ValueError("needs length >= 2: the first mask stands where the next token will")
        self.length = length
        del from_  # attached to the model, it needs no further word

    def fits(self, vision: Vision, masking: Masking | None) -> str | None:
        if masking is None or not masking.causal:
            return (
                "it needs one that fills in masks and also decodes causally, or an adapter: make one "
                "with `outstride train diffusion-adapter`, and name its folder, as in "
                "self-diffuse:from=FOLDER"
            )
        return None

    def _size(self, drafted: int) -> int:
        return drafted + (drafted + 1) * self.length

    def demand(self, view: View) -> Demand:
        drafted = len(view.state or ())
        room = view.limit - view.end - 1
        return Demand(most=self._size(drafted) if room > 0 else 0, gain=1.0 + 0.5 * drafted)

    def propose(self, view: View, room: int) -> Rounds:
        yield from ()
        given, masking = view.given(), view.masking()
        draft: list[int] = list(view.state or ())[: max(0, view.limit - view.end - 1)]
        while draft and self._size(len(draft)) > room:
            draft.pop()
        graph = given.grow(chain(draft, view.end))
        if masking is None or self._size(len(draft)) > room:
            return Proposal(graph, len(given))
        for node in range(len(given) - 1, len(graph)):
            masks = self._masks(int(graph.positions[node]) + 1, masking)
            graph = graph.grow(masks, at=NodeId(node))
        rows = view.params.temperature > 0 and not masking.shifted
        return Proposal(graph, len(given), wants=Wants(logits=rows))

    def _masks(self, start: int, masking: Masking) -> TokenGraph:
        tokens = [masking.token] * self.length
        if masking.block is None:
            return chain(tokens, start, probe=True)
        graph = block(tokens, start)
        return replace(graph, probes=np.ones(self.length, dtype=np.bool_))

    def observe(
        self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict
    ) -> list[int]:
        graph, masking, last = proposal.graph, view.masking(), verdict.keep[-1]
        below = [n for n in graph.children(last) if graph.probes[n]]
        if masking is None or not below:
            return []
        masks = [NodeId(below[0] + i) for i in range(self.length)]
        if masking.shifted:  # each scores the place behind it
            return [int(scores.token(node)) for node in masks]
        return [self._guess(proposal, scores, node) for node in masks[1:]]

    def _guess(self, proposal: Proposal, scores: Scores, node: NodeId) -> int:
        """What a mask stands for. The pass drew it with the noise of the place behind it."""
        if scores.logits is None:
            return int(scores.token(node))
        row, place = scores.logits[scores.row(node)], int(proposal.graph.positions[node])
        return int(best(row, proposal.draw, place)[0])
