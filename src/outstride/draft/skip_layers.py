"""Layer skipping: the further an answer gets, the fewer layers its tokens pass. Lossy."""

from __future__ import annotations

from itertools import takewhile

from outstride.core.contracts import Demand, Drafter, Rounds
from outstride.core.proposal import Proposal, Wants
from outstride.core.sequence import View
from outstride.registry import method


@method("skip-layers", family="self-speculation")
class SkipLayers(Drafter):
    """Each token passes the first layers and the last ones, fewer of them as the answer gets longer.

    It changes the text, and nothing checks it. The prompt passes all layers. From the first token of
    the answer to the one numbered `span`, the budget of layers falls evenly from all of them to
    `least` (0: half of them). What is left out lies behind the first `warm` layers, so a later token
    uses no layer that an earlier one did not pass: all that it looks back at is there. The budget
    follows from the place in the answer alone; so the text is the same in any company, and after a
    preemption, when the answer is read again one budget at a time. A model has to be tuned to do
    without these layers; one that was not is soon at a loss for words.

    Paper: SkipDecode (Del Corro et al., 2023), without its fine-tuning
    Exactness: lossy
    Needs: nothing
    Cost per step: one node, which passes `warm` layers in a round of its own and then the last ones
    """

    partial = True

    def __init__(self, *, warm: int = 4, least: int = 0, span: int = 64) -> None:
        if warm < 1 or span < 1 or (least <= warm and least != 0):
            raise ValueError("needs warm >= 1, span >= 1, and least > warm (or 0: half the layers)")
        self.warm = warm
        self.least = least
        self.span = span

    def resumes(self, position: int, view: View) -> int:
        """The layer at which a token goes on behind the first ones: `warm` if it skips none."""
        layers, place = view.layers, position - view.prompt_length + 1
        least = min(max(self.least or layers // 2, self.warm + 1), layers)
        return self.warm + (layers - least) * min(max(place, 0), self.span) // self.span

    def demand(self, view: View) -> Demand:
        """No nodes; but settled tokens are read again in pieces, as far as they skip the same."""
        if (pending := view.pending()) == 1:
            return Demand()
        first = view.end - pending
        if first < view.prompt_length:
            return Demand(until=view.prompt_length)
        start, behind = self.resumes(first, view), range(first, view.end)
        alike = takewhile(lambda position: self.resumes(position, view) == start, behind)
        return Demand(until=first + sum(1 for _ in alike))

    def propose(self, view: View, room: int) -> Rounds:
        given = view.given()
        start = self.resumes(int(given.positions[0]), view)
        if start == self.warm:
            return Proposal(given, len(given))
        wants = Wants(nodes=(), hidden=(self.warm,))
        scores = yield Proposal(given, len(given), layers=(0, self.warm), wants=wants)
        states = scores.hidden[self.warm]
        return Proposal(given, len(given), layers=(start, view.layers), hidden=states)
