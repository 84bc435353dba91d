"""`guided`: a method that knows what its request's shape forces and forbids.

What must follow is drafted for nothing, whatever the method; what may not follow is taken out of its
drafts before the pass. Neither changes the text of an exact method: drafts are only guesses.
"""

from __future__ import annotations

from dataclasses import replace

from outstride.core.contracts import Demand, Drafter, Exactness, Method, Rounds
from outstride.core.guess import Guess, Sign
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sequence import View
from outstride.grammar.guide import Guide

FORCED = Sign("grammar")
LIKELY = 0.95
"""How often the target spells what is forced as the tokenizer would."""


def guided(method: Method, guide: Guide) -> Method:
    """The method for a request of this shape; plain decoding stays plain."""
    drafter = method.drafter
    if method.exactness is not Exactness.EXACT or not drafter.trimmable:
        return method
    return replace(method, drafter=Guided(drafter, guide))


class Guided(Drafter):
    """A drafter with a guide at its side."""

    def __init__(self, inner: Drafter, guide: Guide) -> None:
        self._inner = inner
        self._guide = guide
        self.name, self.models, self.wants = inner.name, inner.models, inner.wants
        self.weighed = inner.weighed

    def _forced(self, view: View) -> tuple[int, ...]:
        room = view.limit - view.end - 1
        return self._guide.forced(view.tokens[view.prompt_length :])[: max(room, 0)]

    def demand(self, view: View) -> Demand:
        if count := len(self._forced(view)):
            gains = tuple(LIKELY**depth for depth in range(1, count + 1))
            if self.weighed:
                return Demand(gains=gains)
            return Demand(most=count, gain=sum(gains))
        return self._inner.demand(view)

    def propose(self, view: View, room: int) -> Rounds:
        forced = self._forced(view)[:room] if room > 0 else ()
        if forced:
            if self.models:
                yield from self._inner.propose(view, 0)  # its model reads along
            guess = Guess()
            guess.add_run(forced, FORCED, LIKELY)
        elif room > 0:
            guess = self._lawful(view, (yield from self._inner.guess(view, room)))
        else:
            return (yield from self._inner.propose(view, room))
        proposal = guess.proposal(view, self.wants)
        proposal.labels = {proposal.given + i: sign.source for i, sign in enumerate(guess.signs)}
        return proposal

    def _lawful(self, view: View, guess: Guess) -> Guess:
        """What of a guess the shape admits."""
        output, kept, places = view.tokens[view.prompt_length :], Guess(), {-1: -1}
        paths = {-1: output}
        nodes = zip(guess.tokens, guess.parents, guess.signs, guess.chances, strict=True)
        for i, (token, parent, sign, chance) in enumerate(nodes):
            if parent in places and self._guide.allows(paths[parent], token):
                places[i] = kept.add(token, places[parent], sign, chance)
                paths[i] = [*paths[parent], token]
        return kept

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> object:
        return self._inner.observe(view, proposal, scores, verdict)
