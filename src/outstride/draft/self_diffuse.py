"""A model that both continues text and fills in masks drafts for itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from outstride.core.contracts import AttentionPattern, Demand, Drafter, MaskedSpec, Rounds
from outstride.core.graph import NodeId, TokenGraph, block, chain
from outstride.core.proposal import Proposal, Scores, Verdict, Wants
from outstride.core.sampling import best
from outstride.core.sequence import View
from outstride.registry import method


@method("self-diffuse", family="diffusion drafting")
class SelfDiffuse(Drafter):
    """Masks after every drafted token let the target predict, in the same pass, what to draft next.

    A pass verifies the tokens of the draft like any other, and has `length` masks below each of them.
    Those below the last accepted token have been filled in by the same pass: they are the next
    draft. The text is that of plain decoding. `from` names the folder of a diffusion adapter, for
    models that have no masks of their own; without it, the one that is shipped for the model is
    used.

    Paper: Samragh et al. (2025): masks below drafted tokens, with a gated LoRA adapter. Of Set Block
      Decoding, SBD (Gat et al., 2025) and WeDLM (Liu et al., 2025) it has only that one model
      decodes both ways; their own decoding is lossy
    Exactness: exact
    Needs: a masked model that also decodes causally or a diffusion adapter
    Cost per step: up to `length` masks for each drafted token and for the last settled one
    """

    head_kind = "diffusion-adapter"

    def __init__(self, *, length: int = 4, from_: str = "") -> None:
        if length < 2:
            raise ValueError(
                "needs length >= 2: the first mask is at the position of the next token"
            )
        self.length = length
        del from_  # the adapter is attached to the model by now

    def unsupported_reason(
        self, vision: AttentionPattern, masking: MaskedSpec | None
    ) -> str | None:
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
        left = view.limit - view.end - 1
        return Demand(max_nodes=self._size(drafted) if left > 0 else 0, gain=1.0 + 0.5 * drafted)

    def propose(self, view: View, budget: int) -> Rounds:
        yield from ()
        given, masking = view.given(), view.masked_spec()
        draft: list[int] = list(view.state or ())[: max(0, view.limit - view.end - 1)]
        while draft and self._size(len(draft)) > budget:
            draft.pop()
        graph = given.grow(chain(draft, view.end))
        if masking is None or self._size(len(draft)) > budget:
            return Proposal(graph, len(given))
        for node in range(len(given) - 1, len(graph)):
            masks = self._masks(int(graph.positions[node]) + 1, masking)
            graph = graph.grow(masks, at=NodeId(node))
        rows = view.params.temperature > 0 and not masking.shifted
        return Proposal(graph, len(given), wants=Wants(logits=rows))

    def _masks(self, start: int, masking: MaskedSpec) -> TokenGraph:
        tokens = [masking.token] * self.length
        if masking.block is None:
            return chain(tokens, start, probe=True)
        graph = block(tokens, start)
        return replace(graph, probes=np.ones(self.length, dtype=np.bool_))

    def observe(
        self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict
    ) -> list[int]:
        graph, masking, last = proposal.graph, view.masked_spec(), verdict.keep[-1]
        below = [n for n in graph.children(last) if graph.probes[n]]
        if masking is None or not below:
            return []
        masks = [NodeId(below[0] + i) for i in range(self.length)]
        if masking.shifted:  # each scores the position after it
            return [int(scores.token(node)) for node in masks]
        return [self._token(proposal, scores, node) for node in masks[1:]]

    def _token(self, proposal: Proposal, scores: Scores, node: NodeId) -> int:
        """The token of a mask, sampled again: the pass used the noise of the position after it."""
        if scores.logits is None:
            return int(scores.token(node))
        row, position = scores.logits[scores.row(node)], int(proposal.graph.positions[node])
        return int(best(row, proposal.sampling, position)[0])
