"""A draft model that stops where a trained head on its hidden states expects a rejection."""

from __future__ import annotations

import math

from outstride.core.draft_tree import scaled_logit
from outstride.core.proposal import Scores, Wants
from outstride.core.sequence import View
from outstride.draft.draft import DraftModelDrafter
from outstride.draft.tree_expansion import Branch
from outstride.registry import method


@method("accept-head", family="draft model")
class AcceptHead(DraftModelDrafter):
    """A draft model writes a chain and stops where a trained head expects the target to disagree.

    The head reads the draft model's last hidden state and its confidence, and predicts how likely the
    next drafted token is accepted. Drafting ends once the probability that the whole draft is accepted
    falls below `stop`, or after `length` tokens. `from` names the folder of the head, which is
    trained for the draft model on the target's text.

    Paper: SpecDec++ (Huang et al., 2024)
    Exactness: exact
    Needs: draft model, draft head
    Cost per step: up to `length` passes of the draft model, shared by all sequences that use it, and
      as many further nodes of the target
    """

    head_kind = "accept-head"
    head_on_draft_model = True

    def __init__(self, *, model: str, from_: str, length: int = 8, stop: float = 0.3) -> None:
        if not 0 < stop < 1:
            raise ValueError("needs stop between 0 and 1")
        super().__init__(model=model, length=length, min_prob=stop)
        self.head = from_

    def asking(self, view: View) -> Wants:
        return Wants(hidden=(view.filter(self.head).layer,), logprobs=0)

    def branches(self, view: View, scores: Scores, above: Branch, at: int) -> list[Branch]:
        del at
        head = view.filter(self.head)
        token, logprob = scores.logprobs[scores.row(above.node)][0]
        hidden = scores.hidden[head.layer][-1:]  # of the last node, which is the one asked about
        rate = float(head.of_hidden_states(hidden, scaled_logit(logprob))[0])
        score = above.score + math.log(max(rate, 1e-9))
        return [Branch(token, above.place, score=score, rate=rate)]
