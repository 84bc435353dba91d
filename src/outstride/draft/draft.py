"""A smaller model of the same vocabulary writes the draft."""

from __future__ import annotations

from dataclasses import dataclass

from outstride.core.contracts import Demand, Drafter, Rounds
from outstride.core.graph import FloatArray, NodeId, chain, tree
from outstride.core.proposal import Proposal, Wants
from outstride.core.sampling import Draw, Purpose
from outstride.core.sequence import View
from outstride.registry import method


@dataclass(slots=True)
class _Guess:
    """A drafted token: its place in the draft, and in the draft model's own graph once it is read."""

    token: int
    parent: int
    depth: int
    cost: int
    """Sum of ranks on the way here: the draft model's own first choices cost nothing."""
    node: NodeId | None = None
    chance: FloatArray | None = None


@method("draft", family="draft model")
class Draft(Drafter):
    """A smaller model writes a chain, or a tree of its likeliest tokens, for the target to check.

    It samples with the request's own temperature, filters and noise, so that sampled drafts agree
    with the target as often as greedy ones. Siblings are the top-k of logit plus noise.

    Paper: Speculative Decoding (Leviathan et al., 2023); Speculative Sampling (Chen et al., 2023);
      token trees as in SpecInfer (Miao et al., 2024)
    Exactness: exact
    Needs: draft model
    Cost per step: `length` passes of the draft model, shared by all sequences that use it, and up to
      width + (length - 1) * width**2 further nodes of the target
    """

    purpose = Purpose.TOKEN

    def __init__(self, *, model: str, length: int = 4, width: int = 1) -> None:
        if length < 1 or width < 1:
            raise ValueError("needs length >= 1 and width >= 1")
        self.model = model
        self.models = (model,)
        self.length = length
        self.width = width

    def demand(self, view: View) -> Demand:
        depth = min(self.length, view.limit - view.end - 1)
        most = self.width + (depth - 1) * self.width**2 if depth > 0 else 0
        return Demand(most=most, gain=2.0)

    def propose(self, view: View, room: int) -> Rounds:
        given = view.given()
        own = view.given(self.model, view.chunk)
        if len(own) < view.pending(self.model):
            yield Proposal(own, len(own), self.model, wants=Wants(nodes=()))
            return Proposal(given, len(given))
        depth = min(self.length, view.limit - view.end - 1, room)
        guesses: list[_Guess] = []
        graph, frontier = own, [_Guess(token=-1, parent=-1, depth=0, cost=0)]
        for level in range(depth):
            wants = Wants(best=self.width, rows=self.purpose is Purpose.DRAFT)
            if level == 0:
                expanded = [NodeId(len(graph) - 1)]
            else:
                for guess in frontier:
                    above = (
                        guesses[guess.parent].node if guess.parent >= 0 else NodeId(len(own) - 1)
                    )
                    guess.node = NodeId(len(graph))
                    graph = graph.grow(chain([guess.token], view.end + level - 1), at=above)
                expanded = [g.node for g in frontier if g.node is not None]
            asked = Wants(nodes=tuple(expanded), best=wants.best, rows=wants.rows)
            draw = Draw(purpose=self.purpose)
            scores = yield Proposal(graph, len(own), self.model, wants=asked, draw=draw)
            fresh: list[_Guess] = []
            for guess, node in zip(frontier, expanded, strict=True):
                parent = guesses.index(guess) if level else -1
                for rank, token in enumerate(scores.rivals(node)):
                    row = scores.probabilities(node) if wants.rows else None
                    fresh.append(_Guess(token, parent, level, guess.cost + rank, chance=row))
            fresh = sorted(fresh, key=lambda g: g.cost)[: room - len(guesses)]
            guesses += fresh
            frontier = fresh[: self.width]
            if not frontier or len(guesses) >= room:
                break
        drafted = tree([g.token for g in guesses], [g.parent for g in guesses], view.end)
        return Proposal(
            given.grow(drafted),
            len(given),
            drafted={
                len(given) + i: g.chance for i, g in enumerate(guesses) if g.chance is not None
            },
            wants=Wants(rows=self.purpose is Purpose.DRAFT),
        )


@method("rejection", family="draft model", acceptor="rejection")
class DraftRejection(Draft):
    """A smaller model writes a chain with noise of its own; the classic rejection rule judges it.

    It accepts more than equality can, but keeps only the distribution: the text depends on draft
    lengths, and so on load.

    Paper: Speculative Decoding (Leviathan et al., 2023); Speculative Sampling (Chen et al., 2023)
    Exactness: distribution
    Needs: draft model
    Cost per step: `length` passes of the draft model, shared, and `length` further nodes
    """

    purpose = Purpose.DRAFT

    def __init__(self, *, model: str, length: int = 4) -> None:
        super().__init__(model=model, length=length)
