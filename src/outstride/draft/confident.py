"""The target guesses several tokens at once and keeps those that it is sure of. Lossy."""

from __future__ import annotations

from outstride.core.contracts import Demand, Drafter, Rounds
from outstride.core.graph import chain
from outstride.core.proposal import Proposal, Wants
from outstride.core.sequence import View
from outstride.registry import method


@method("confident", family="lexical units", acceptor="confident")
class Confident(Drafter):
    """Placeholders behind the text let the target guess further tokens; a run of sure ones stays.

    It changes the text: tokens behind the first are written without having seen those before them,
    and nothing checks them. They stay while the target's probability is at least `sure`. It needs a
    model that was tuned to guess behind the placeholder `pad`; others are seldom sure, and then this
    is plain decoding with idle nodes.

    Paper: Lexical Unit Decoding (Sun et al., 2024)
    Exactness: lossy
    Needs: a target tuned on placeholders
    Cost per step: `length` further nodes, which leave nothing in the cache
    """

    def __init__(self, *, length: int = 3, pad: int = 0, sure: float = 0.9) -> None:
        if length < 1 or pad < 0 or not 0 < sure <= 1:
            raise ValueError("needs length >= 1, pad >= 0 and 0 < sure <= 1")
        self.length = length
        self.pad = pad
        self.tokens = (pad,)

    def demand(self, view: View) -> Demand:
        return Demand(most=max(0, min(self.length, view.limit - view.end - 1)), gain=1.0)

    def propose(self, view: View, room: int) -> Rounds:
        yield from ()
        given = view.given()
        count = max(0, min(room, self.length, view.limit - view.end - 1))
        places = chain([self.pad] * count, view.end, probe=True)
        return Proposal(given.grow(places), len(given), wants=Wants(logprobs=0))
