"""Entropy decides which of two models writes a token. Lossy."""

from __future__ import annotations

import numpy as np

from outstride.core.contracts import Rounds
from outstride.core.graph import FloatArray, chain
from outstride.core.proposal import Proposal, Scores, Wants
from outstride.core.sequence import View
from outstride.draft.writer import Branch, Writer
from outstride.registry import method


def entropy(logits: FloatArray) -> float:
    """In nats, of raw logits."""
    x = logits.astype(np.float64) - float(logits.max())
    weights = np.exp(x)
    total = float(weights.sum())
    return float(np.log(total) - (weights * x).sum() / total)


@method("entropy-switch", family="token routing", acceptor="trust")
class EntropySwitch(Writer):
    """A smaller model writes by itself while it is sure; where it is not, the target writes a token.

    It changes the text: whatever the smaller model writes stays, unchecked. `entropy` is how
    undecided it may be, in nats, token by token (the paper averages over the latest few). The target
    reads what was written when its turn comes, all of it in one pass.

    Paper: Entropy Adaptive Decoding (Simonds, 2025)
    Exactness: lossy
    Needs: draft model
    Cost per step: up to `length` + 1 passes of the draft model, and as many nodes of the target
    """

    asks = Wants(logits=True)

    def __init__(self, *, model: str, length: int = 8, entropy: float = 1.0) -> None:
        super().__init__(model=model, length=length)
        if entropy <= 0:
            raise ValueError("needs entropy > 0")
        self.entropy = entropy

    def branches(self, view: View, scores: Scores, above: Branch, at: int) -> list[Branch]:
        if scores.logits is None or entropy(scores.logits[-1]) > self.entropy:
            return []
        return [Branch(scores.token(above.node), above.place)]

    def propose(self, view: View, room: int) -> Rounds:
        given = view.given()
        written = yield from self.write(view, room)
        return Proposal(given.grow(chain([b.token for b in written], view.end)), len(given))
