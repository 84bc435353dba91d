"""The draft model writes on while the target scores what it wrote before."""

from __future__ import annotations

import math
from collections.abc import Generator

from outstride.core.contracts import Demand, Drafter, Guessing
from outstride.core.graph import NodeId, chain
from outstride.core.guess import Guess, Sign
from outstride.core.proposal import Proposal, Scores, Verdict, Wants
from outstride.core.sequence import View
from outstride.draft.draft import UNTOLD, chances
from outstride.draft.writer import Branch, leading
from outstride.registry import method


def _start(guess: Guess, count: int) -> Guess:
    """The first tokens of a guess."""
    return Guess(
        guess.tokens[:count], guess.parents[:count], guess.signs[:count], guess.chances[:count]
    )


def _child(guess: Guess, place: int, token: int) -> int | None:
    """Where a token stands below another, if it does."""
    for i in range(place + 1, len(guess)):
        if guess.parents[i] == place and guess.tokens[i] == token:
            return i
    return None


def _below(guess: Guess, top: int) -> Guess:
    """What hangs below a token, as a guess of its own."""
    found, place = Guess(), {top: -1}
    for i in range(top + 1, len(guess)):
        if guess.parents[i] in place:
            above = place[guess.parents[i]]
            place[i] = found.add(guess.tokens[i], above, guess.signs[i], guess.chances[i])
    return found


@method("pearl", family="draft model")
class Pearl(Drafter):
    """A smaller model writes while the target works, so that neither waits for the other.

    When nothing is written, the target goes ahead with what is settled (the first drafted token is
    checked while the others are written); when something is, the target checks that, and the draft
    model continues it meanwhile. A continuation is kept if the target's own next token begins it.
    With `width` above 1, draws are hedged: the draft model also continues from where the target is
    likeliest to disagree, so that a rejection finds its continuation written already.

    Paper: PEARL (Liu et al., 2025), pre- and post-verify; branches as in SpecBranch (Shen et al.,
      2025), placed by the draft model's confidence alone
    Exactness: exact
    Needs: draft model
    Cost per step: `length` passes of the draft model over `width` nodes each, while the target works;
      up to `length` further nodes of the target for each branch that survived
    """

    def __init__(self, *, model: str, length: int = 4, width: int = 1) -> None:
        if length < 1 or width < 1:
            raise ValueError("needs length >= 1 and width >= 1")
        self.model = model
        self.models = (model,)
        self.length = length
        self.width = width

    def demand(self, view: View) -> Demand:
        held: Guess = view.state or Guess()
        return Demand(most=len(held), gain=0.5 * min(len(held), self.length))

    def guess(self, view: View, room: int) -> Guessing:
        yield from ()
        return _start(view.state or Guess(), room)

    def ahead(self, view: View, proposal: Proposal) -> Generator[Proposal, Scores, Guess]:
        own = view.given(self.model, view.chunk)
        if len(own) < view.pending(self.model):
            yield Proposal(own, len(own), self.model, wants=Wants(nodes=()))
            return Guess()
        if view.reading:
            return Guess()
        guess = _start(view.state or Guess(), len(proposal.graph) - proposal.given)
        graph = own.grow(guess.graph(view.end))
        depths: dict[int, int] = {-1: 0}
        for place, parent in enumerate(guess.parents):
            depths[place] = depths[parent] + 1
        places = list(depths)
        for level in range(self.length):
            nodes = tuple(len(own) + place for place in places)
            hedged = level == 0 and self.width > 1
            most = 4 * self.width if hedged else None
            wants = Wants(nodes, best=self.width if hedged else 1, logprobs=most)
            scores = yield Proposal(graph, len(own), self.model, wants=wants)
            fresh = [
                branch
                for place, node in zip(places, nodes, strict=True)
                if view.end + depths[place] < view.limit - 1
                for branch in self._continued(view, guess, scores, NodeId(node), place, depths)
            ]
            places = []
            for branch in leading(fresh, self.width):
                sign = Sign("pearl", (branch.rank, min(depths[branch.parent], 4)))
                place = guess.add(branch.token, branch.parent, sign, branch.chance)
                depths[place] = depths[branch.parent] + 1
                at = NodeId(len(own) + branch.parent)
                graph = graph.grow(chain([branch.token], view.end + depths[place] - 1), at=at)
                places.append(place)
            if not places:
                break
        return guess

    def _continued(
        self,
        view: View,
        guess: Guess,
        scores: Scores,
        node: NodeId,
        place: int,
        depths: dict[int, int],
    ) -> list[Branch]:
        """What may follow at a place and is not written yet."""
        weighed = [UNTOLD]
        if scores.logprobs:
            weighed = chances(view, scores, node, view.end + depths[place])
        path, above = 0.0, place
        while above >= 0:
            path, above = path + math.log(max(guess.chances[above], 1e-9)), guess.parents[above]
        return [
            Branch(token, place, rank=rank, chance=chance, score=path + math.log(max(chance, 1e-9)))
            for rank, (token, chance) in enumerate(zip(scores.rivals(node), weighed, strict=True))
            if _child(guess, place, token) is None
        ]

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> Guess:
        guess: Guess = view.state or Guess()
        place = -1
        for _, token in sorted(verdict.settled.items()):
            found = _child(guess, place, token)
            if found is None:
                return Guess()
            place = found
        return _below(guess, place)
