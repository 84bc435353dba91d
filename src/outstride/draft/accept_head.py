"""A draft model that knows when to stop, by a trained head on its own states."""

from __future__ import annotations

import math

from outstride.core.guess import shown_odds
from outstride.core.proposal import Scores, Wants
from outstride.core.sequence import View
from outstride.draft.draft import Draft
from outstride.draft.writer import Branch
from outstride.registry import method


@method("accept-head", family="draft model")
class AcceptHead(Draft):
    """A smaller model writes a chain and stops where a trained head expects the target to disagree.

    The head reads the draft model's last state and its confidence, and says how likely the token that
    it is about to write will hold. Drafting ends once the chance that the whole draft holds falls
    below `stop`, or after `length` tokens. `from` names the folder of the head, which was trained for
    the draft model on the target's words.

    Paper: SpecDec++ (Huang et al., 2024)
    Exactness: exact
    Needs: draft model, trained part
    Cost per step: up to `length` passes of the draft model, shared by all sequences that use it, and
      as many further nodes of the target
    """

    part = "accept-head"
    part_of_draft = True

    def __init__(self, *, model: str, from_: str, length: int = 8, stop: float = 0.3) -> None:
        if not 0 < stop < 1:
            raise ValueError("needs stop between 0 and 1")
        super().__init__(model=model, length=length, least=stop)
        self.head = from_

    def asking(self, view: View) -> Wants:
        return Wants(hidden=(view.filter(self.head).layer,), logprobs=0)

    def branches(self, view: View, scores: Scores, above: Branch, at: int) -> list[Branch]:
        del at
        head = view.filter(self.head)
        token, logprob = scores.logprobs[scores.row(above.node)][0]
        state = scores.hidden[head.layer][-1:]  # of the last node, which is the one asked about
        chance = float(head.of_states(state, shown_odds(logprob))[0])
        score = above.score + math.log(max(chance, 1e-9))
        return [Branch(token, above.place, score=score, chance=chance)]
