"""Token trees of a draft model, expanded level by level, one round of the model per level."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from outstride.core.contracts import Demand, Drafter
from outstride.core.graph import ROOT, FloatArray, IntArray, NodeId, chain
from outstride.core.proposal import Proposal, Scores, Wants
from outstride.core.sampling import Purpose, SamplingSpec, gumbel
from outstride.core.sequence import View


@dataclass(eq=False, slots=True)
class Branch:
    """A drafted token: its place in the draft, and its node in the draft model's own graph."""

    token: int
    parent: int
    """The place of the token that it follows; -1 for the settled text."""
    place: int = -1
    rank: int = 0
    """How many siblings the draft model ranked before it."""
    score: float = 0.0
    """The log-rate of the whole path down to here; never above its parent's."""
    rate: float = 0.0
    """The draft model's estimate that it is accepted if its parent is."""
    logprob: float = 0.0
    """The log-probability of the whole path under the draft model."""
    row: FloatArray | None = None
    """The distribution that it was sampled from."""
    node: NodeId = ROOT


class DraftModelUser(Drafter):
    """A drafter that asks one draft model for up to `length` tokens in `width` branches."""

    def __init__(self, *, model: str, length: int, width: int = 1) -> None:
        if length < 1 or width < 1:
            raise ValueError("needs length >= 1 and width >= 1")
        self.model = model
        self.models = (model,)
        self.length = length
        self.width = width


class DraftModelExpansion(DraftModelUser):
    """Expands a tree of the draft model's tokens. Subclasses say how a node branches and which
    branches are continued."""

    purpose = Purpose.TOKEN
    """Which noise the draft model's pass adds."""
    asks = Wants()
    """What is wanted of the draft model for each node that is continued."""

    def max_nodes(self, depth: int) -> int:
        """How many nodes a draft of this depth may have."""
        return depth * self.width

    def demand(self, view: View) -> Demand:
        depth = max(0, min(self.length, view.limit - view.end - 1))
        return Demand(max_nodes=self.max_nodes(depth), gain=0.5 * depth)

    def depth(self, view: View, budget: int) -> int:
        """How many levels to expand."""
        return min(self.length, view.limit - view.end - 1, budget)

    def asking(self, view: View) -> Wants:
        """What is wanted of the draft model for each node that is continued."""
        del view
        return self.asks

    def branches(self, view: View, scores: Scores, above: Branch, at: int) -> list[Branch]:
        """The tokens that may follow a branch at position `at`, in order."""
        raise NotImplementedError

    def select(self, fresh: list[Branch]) -> tuple[list[Branch], list[Branch]]:
        """Of a new level: the branches that stay in the draft, and those of them to continue."""
        return fresh, fresh

    def expand(self, view: View, budget: int) -> Generator[Proposal, Scores, list[Branch]]:
        """The branches of a draft, parents first. Empty while the draft model is prefilling."""
        own = view.given(self.model, view.chunk)
        if len(own) < view.num_uncomputed(self.model):
            yield Proposal(own, len(own), self.model, wants=Wants(nodes=()))
            return []
        drafted: list[Branch] = []
        root = Branch(token=-1, parent=-1, node=NodeId(len(own) - 1))
        graph, continued = own, [root]
        for level in range(self.depth(view, budget)):
            for branch in continued if level else ():
                above = root if branch.parent < 0 else drafted[branch.parent]
                branch.node = NodeId(len(graph))
                graph = graph.grow(chain([branch.token], view.end + level - 1), at=above.node)
            asked = replace(self.asking(view), nodes=tuple(branch.node for branch in continued))
            noise = SamplingSpec(purpose=self.purpose)
            scores = yield Proposal(graph, len(own), self.model, wants=asked, sampling=noise)
            fresh: list[Branch] = []
            for above in continued:
                fresh += self.branches(view, scores, above, view.end + level)
            kept, continued = self.select(fresh)
            for place, branch in enumerate(kept, start=len(drafted)):
                branch.place = place
            drafted += kept
            if not continued:
                break
        return drafted


def noise_of(
    sampling: SamplingSpec, at: int | IntArray, tokens: Sequence[int] | IntArray
) -> FloatArray:
    """The noise of tokens in any order, at one position or at one for each of them."""
    ids = np.asarray(tokens, dtype=np.int64)
    return gumbel(sampling, np.broadcast_to(np.asarray(at, dtype=np.int64), ids.shape), ids)


def best_branches(branches: list[Branch], limit: int) -> list[Branch]:
    """The `limit` branches with the best scores, in their old order; of equals, the first."""
    if len(branches) <= limit:
        return branches
    order = sorted(range(len(branches)), key=lambda i: (-branches[i].score, i))
    return [branches[i] for i in sorted(order[:limit])]


def best_paths(drafted: list[Branch], limit: int) -> list[Branch]:
    """A draft pruned to its `limit` best branches. No score exceeds its parent's, so every branch
    that stays keeps its parent."""
    if len(drafted) <= limit:
        return drafted
    chosen = best_branches(drafted, limit)
    place = {-1: -1} | {branch.place: i for i, branch in enumerate(chosen)}
    return [replace(b, place=place[b.place], parent=place[b.parent]) for b in chosen]
