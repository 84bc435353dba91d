"""A small autoregressive model steers what a masked model settles."""

from __future__ import annotations

import numpy as np

from outstride.core.canvas import recall
from outstride.core.contracts import Rounds
from outstride.core.graph import FloatArray, chain
from outstride.core.proposal import Proposal, Wants
from outstride.core.sequence import View
from outstride.draft.canvas import Canvas
from outstride.registry import method


@method("guided", family="diffusion", acceptor="guided")
class Guided(Canvas):
    """Settles a run of tokens from the first gap on that a small autoregressive model vouches for.

    The guide reads the guesses of the last pass in one pass of its own; masks know what stands to the
    right, the guide how tokens follow each other. A token is the best of their product, the masked
    model's with the exponent `weight`; with `agree`, it is the masked model's own, and the run ends
    where the guide would have said something else. It also ends where a token differs from what the
    guide had read. Both models draw with the same noise.

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

    def propose(self, view: View, room: int) -> Rounds:
        pending = view.pending(self.model)
        if room <= 0 or pending > view.chunk:  # the guide reads first, up to the last token
            own = view.given(self.model, min(pending - 1, view.chunk))
            if len(own):
                yield Proposal(own, len(own), self.model, wants=Wants(nodes=()))
            return (yield from super().propose(view, 0))
        proposal = yield from super().propose(view, room)
        own = view.given(self.model)
        guessed: dict[int, int] = recall(view).note or {}
        run: list[int] = []
        while view.end + len(run) in guessed:
            run.append(guessed[view.end + len(run)])
        graph = own.grow(chain(run, view.end))
        nodes = tuple(range(len(own) - 1, len(graph)))
        scores = yield Proposal(graph, len(own), self.model, wants=Wants(nodes=nodes, logits=True))
        if scores.logits is not None:
            drafted, positions = {}, proposal.graph.positions
            for node in proposal.wants.nodes or ():
                place = int(positions[node]) + proposal.offset - view.end
                if 0 <= place < len(scores.logits):
                    drafted[node] = _as_known(scores.logits[place], view.vocab_size)
            proposal.drafted = drafted
        return proposal


def _as_known(row: FloatArray, size: int) -> FloatArray:
    """Log-probabilities over the target's vocabulary; what the guide does not know is impossible."""
    x = row[:size].astype(np.float64)
    x -= x.max()
    known = np.full(size, -1e9, dtype=np.float32)
    known[: len(x)] = x - np.log(np.exp(x).sum())
    return known
