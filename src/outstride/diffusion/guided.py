"""`guided`: a small autoregressive model steers which predictions a masked model settles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from outstride.core.contracts import Rounds
from outstride.core.graph import FloatArray, chain
from outstride.core.proposal import Proposal, Scores, Wants
from outstride.core.sampling import best
from outstride.core.sequence import View
from outstride.core.softmax import log_softmax
from outstride.diffusion.canvas import recall
from outstride.diffusion.unmasker import Prediction, Unmasker, logits_of
from outstride.registry import method


@method("guided", family="diffusion")
class GuidedUnmasker(Unmasker):
    """Settles a run of tokens from the first gap on that a small autoregressive model vouches for.

    The guide reads the predictions of the last pass in one pass of its own; masks know what stands to
    the right, the guide how tokens follow each other. A token is the best of their product, the masked
    model's with the exponent `weight`; with `agree`, it is the masked model's own, and the run ends
    where the guide would have chosen another. It also ends where a token differs from what the guide
    had read, because the guide's scores count only for the text that it read. Both models sample with
    the same noise.

    Paper: Adaptive Parallel Decoding, APD (Israel et al., 2025); Guided Diffusion (Hu et al., 2025)
    Exactness: lossy
    Needs: a masked model, draft model
    Cost per step: one block, whole rows of logits, and one pass of the guide over as many tokens
    """

    asks = Wants(logprobs=0, logits=True)

    def __init__(
        self, *, model: str, weight: float = 0.5, agree: bool = False, block: int = 0
    ) -> None:
        super().__init__(block=block)
        if not 0 <= weight <= 1:
            raise ValueError("needs 0 <= weight <= 1")
        self.model = model
        self.models = (model,)
        self.weight = weight
        self.agree = agree

    def propose(self, view: View, budget: int) -> Rounds:
        pending = view.num_uncomputed(self.model)
        if budget <= 0 or pending > view.chunk:  # the guide's prefill, up to the last token
            own = view.given(self.model, min(pending - 1, view.chunk))
            if len(own):
                yield Proposal(own, len(own), self.model, wants=Wants(nodes=()))
            return (yield from super().propose(view, 0))
        proposal = yield from super().propose(view, budget)
        own = view.given(self.model)
        predicted: dict[int, int] = recall(view).note or {}
        run: list[int] = []
        while view.end + len(run) in predicted:
            run.append(predicted[view.end + len(run)])
        graph = own.grow(chain(run, view.end))
        nodes = tuple(range(len(own) - 1, len(graph)))
        scores = yield Proposal(graph, len(own), self.model, wants=Wants(nodes=nodes, logits=True))
        if scores.logits is not None:
            drafted, positions = {}, proposal.graph.positions
            for node in proposal.wants.nodes or ():
                place = int(positions[node]) + proposal.offset - view.end
                if 0 <= place < len(scores.logits):
                    drafted[node] = _in_vocabulary(scores.logits[place], view.vocab_size)
            proposal.drafted = drafted
        return proposal

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Prediction]
    ) -> list[Prediction]:
        read: dict[int, int] = recall(view).note or {}
        chosen: list[Prediction] = []
        for place, prediction in enumerate(found):
            if prediction.position != view.end + place or prediction.node not in proposal.drafted:
                break
            settled = self._decide(proposal, scores, prediction)
            chosen.append(settled or prediction)
            if settled is None or settled.token != read.get(settled.position):
                break
        return chosen or found[:1]

    def _decide(
        self, proposal: Proposal, scores: Scores, prediction: Prediction
    ) -> Prediction | None:
        """The token of both models together; None if the guide objects to it."""
        guide = proposal.drafted[prediction.node]
        processors = proposal.processors.get(prediction.node)

        def pick(row: FloatArray) -> int:
            processed = row if processors is None else processors.apply(row)
            return int(best(processed, proposal.sampling, prediction.position)[0])

        if self.agree:
            return prediction if pick(guide) == prediction.token else None
        own = log_softmax(logits_of(scores, prediction)).astype(np.float32)
        row = self.weight * own + (1.0 - self.weight) * guide
        return replace(prediction, token=pick(row.astype(np.float32)))

    def note(
        self,
        view: View,
        proposal: Proposal,
        scores: Scores,
        found: list[Prediction],
        settled: list[Prediction],
    ) -> dict[int, int]:
        done = {p.position for p in settled}
        return {p.position: p.token for p in found if p.position not in done}


def _in_vocabulary(logits: FloatArray, size: int) -> FloatArray:
    """Log-probabilities over the target's vocabulary; tokens that the guide lacks are impossible."""
    known = np.full(size, -1e9, dtype=np.float32)
    known[: min(len(logits), size)] = log_softmax(logits[:size])
    return known
