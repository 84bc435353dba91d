"""`pearl`: the draft model goes on drafting while the target verifies the last draft."""

from __future__ import annotations

import math
from collections.abc import Generator

from outstride.core.contracts import Demand, DraftRounds
from outstride.core.draft_tree import AcceptanceKey, DraftTree
from outstride.core.graph import NodeId, chain
from outstride.core.proposal import Proposal, Scores, Verdict, Wants
from outstride.core.sequence import View
from outstride.draft.draft import DEFAULT_RATE, agreement_rates
from outstride.draft.tree_expansion import Branch, DraftModelUser, best_branches
from outstride.registry import method


def _start(draft: DraftTree, count: int) -> DraftTree:
    """The first `count` tokens of a draft."""
    return DraftTree(
        draft.tokens[:count], draft.parents[:count], draft.keys[:count], draft.rates[:count]
    )


def _child(draft: DraftTree, place: int, token: int) -> int | None:
    """The place of the child with this token; None if there is none."""
    for i in range(place + 1, len(draft)):
        if draft.parents[i] == place and draft.tokens[i] == token:
            return i
    return None


def _below(draft: DraftTree, top: int) -> DraftTree:
    """The subtree below a token, as a draft of its own."""
    found, place = DraftTree(), {top: -1}
    for i in range(top + 1, len(draft)):
        if draft.parents[i] in place:
            above = place[draft.parents[i]]
            place[i] = found.add(draft.tokens[i], above, draft.keys[i], draft.rates[i])
    return found


@method("pearl", family="draft model")
class PearlDrafter(DraftModelUser):
    """A smaller model writes while the target works, so that neither waits for the other.

    When nothing is written, the target goes ahead with what is settled (the first drafted token is
    checked while the others are written); when something is, the target checks that, and the draft
    model continues it meanwhile. A continuation is kept if the target's own next token begins it.
    With `width` above 1, the draft model also continues from where the target is likeliest to
    disagree, so that a rejection finds its continuation written already. PEARL's pre-verify and
    post-verify are here; SpecBranch's draft lengths from features of the target are not.

    Paper: PEARL (Liu et al., 2025), pre- and post-verify; branches as in SpecBranch (Shen et al.,
      2025), placed by the draft model's confidence alone
    Exactness: exact
    Needs: draft model
    Cost per step: `length` passes of the draft model over `width` nodes each, while the target works;
      up to `length` further nodes of the target for each branch that survived
    """

    def __init__(self, *, model: str, length: int = 4, width: int = 1) -> None:
        super().__init__(model=model, length=length, width=width)

    def demand(self, view: View) -> Demand:
        held: DraftTree = view.state or DraftTree()
        return Demand(max_nodes=len(held), gain=0.5 * min(len(held), self.length))

    def draft_tree(self, view: View, budget: int) -> DraftRounds:
        yield from ()
        return _start(view.state or DraftTree(), budget)

    def draft_ahead(self, view: View, proposal: Proposal) -> Generator[Proposal, Scores, DraftTree]:
        own = view.given(self.model, view.chunk)
        if len(own) < view.num_uncomputed(self.model):
            yield Proposal(own, len(own), self.model, wants=Wants(nodes=()))
            return DraftTree()
        if view.allotted < view.num_uncomputed():
            return DraftTree()
        draft = _start(view.state or DraftTree(), len(proposal.graph) - proposal.given)
        graph = own.grow(draft.graph(view.end))
        depths: dict[int, int] = {-1: 0}
        for place, parent in enumerate(draft.parents):
            depths[place] = depths[parent] + 1
        places = list(depths)
        for level in range(self.length):
            nodes = tuple(len(own) + place for place in places)
            branching = level == 0 and self.width > 1
            logprobs = 4 * self.width if branching else None
            wants = Wants(nodes, best=self.width if branching else 1, logprobs=logprobs)
            scores = yield Proposal(graph, len(own), self.model, wants=wants)
            fresh = [
                branch
                for place, node in zip(places, nodes, strict=True)
                if view.end + depths[place] < view.limit - 1
                for branch in self._continued(view, draft, scores, NodeId(node), place, depths)
            ]
            places = []
            for branch in best_branches(fresh, self.width):
                key = AcceptanceKey("pearl", (branch.rank, min(depths[branch.parent], 4)))
                place = draft.add(branch.token, branch.parent, key, branch.rate)
                depths[place] = depths[branch.parent] + 1
                at = NodeId(len(own) + branch.parent)
                graph = graph.grow(chain([branch.token], view.end + depths[place] - 1), at=at)
                places.append(place)
            if not places:
                break
        return draft

    def _continued(
        self,
        view: View,
        draft: DraftTree,
        scores: Scores,
        node: NodeId,
        place: int,
        depths: dict[int, int],
    ) -> list[Branch]:
        """The branches that may follow a place and are not in the draft yet."""
        rates = [DEFAULT_RATE]
        if scores.logprobs:
            rates = agreement_rates(view, scores, node, view.end + depths[place])
        path, above = 0.0, place
        while above >= 0:
            path, above = path + math.log(max(draft.rates[above], 1e-9)), draft.parents[above]
        return [
            Branch(token, place, rank=rank, rate=rate, score=path + math.log(max(rate, 1e-9)))
            for rank, (token, rate) in enumerate(zip(scores.candidates(node), rates, strict=True))
            if _child(draft, place, token) is None
        ]

    def observe(
        self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict
    ) -> DraftTree:
        draft: DraftTree = view.state or DraftTree()
        place = -1
        for _, token in sorted(verdict.settled.items()):
            found = _child(draft, place, token)
            if found is None:
                return DraftTree()
            place = found
        return _below(draft, place)
