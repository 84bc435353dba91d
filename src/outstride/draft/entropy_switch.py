"""`entropy-switch`: a draft model writes the tokens that it is sure of, unchecked. Lossy."""

from __future__ import annotations

from outstride.core.contracts import Rounds
from outstride.core.graph import chain
from outstride.core.proposal import Proposal, Scores, Wants
from outstride.core.sequence import View
from outstride.core.softmax import entropy, softmax
from outstride.draft.tree_expansion import Branch, DraftModelExpansion
from outstride.registry import method


@method("entropy-switch", family="token routing", acceptor="all")
class EntropySwitch(DraftModelExpansion):
    """A smaller model writes by itself while it is sure; where it is not, the target writes a token.

    It changes the text: whatever the smaller model writes stays, unchecked. `entropy` is how
    undecided it may be, in nats, token by token (the paper averages over the latest few). When the
    target's turn comes, it computes all that was written since in one pass.

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
        if scores.logits is None or entropy(softmax(scores.logits[-1])) > self.entropy:
            return []
        return [Branch(scores.token(above.node), above.place)]

    def propose(self, view: View, budget: int) -> Rounds:
        given = view.given()
        drafted = yield from self.expand(view, budget)
        return Proposal(given.grow(chain([b.token for b in drafted], view.end)), len(given))
