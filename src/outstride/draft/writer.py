"""A draft model at work: a tree of tokens, written level by level, one round per level."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from outstride.core.contracts import Demand, Drafter
from outstride.core.graph import ROOT, FloatArray, IntArray, NodeId, chain
from outstride.core.proposal import Proposal, Scores, Wants
from outstride.core.sampling import Draw, Purpose, gumbel
from outstride.core.sequence import View


@dataclass(eq=False, slots=True)
class Branch:
    """A written token: where it stands in the draft, and in the draft model's own graph once read."""

    token: int
    parent: int
    """The place of the token that it follows; -1 for what is settled."""
    place: int = -1
    rank: int = 0
    """How many siblings the draft model put before it."""
    score: float = 0.0
    """Of the whole path down to here; never above its parent's."""
    chance: float = 0.0
    """That it holds if its parent does, in the draft model's view."""
    logprob: float = 0.0
    """Of the whole path, in the draft model's view."""
    row: FloatArray | None = None
    """The distribution that it was drawn from."""
    node: NodeId = ROOT


class Writer(Drafter):
    """What drafters with a draft model have in common. They say how a node branches and who goes on."""

    purpose = Purpose.TOKEN
    """Whose noise the draft model's pass adds."""
    asks = Wants()
    """What is wanted of the draft model for each node that is continued."""

    def __init__(self, *, model: str, length: int, width: int = 1) -> None:
        if length < 1 or width < 1:
            raise ValueError("needs length >= 1 and width >= 1")
        self.model = model
        self.models = (model,)
        self.length = length
        self.width = width

    def most(self, depth: int) -> int:
        """How many nodes a draft of this depth may have."""
        return depth * self.width

    def demand(self, view: View) -> Demand:
        depth = max(0, min(self.length, view.limit - view.end - 1))
        return Demand(most=self.most(depth), gain=0.5 * depth)

    def depth(self, view: View, room: int) -> int:
        """How many levels to write."""
        return min(self.length, view.limit - view.end - 1, room)

    def asking(self, view: View) -> Wants:
        """What is wanted of the draft model for each node that is continued."""
        del view
        return self.asks

    def branches(self, view: View, scores: Scores, above: Branch, at: int) -> list[Branch]:
        """What may stand behind a branch at position `at`, in order."""
        raise NotImplementedError

    def sift(self, fresh: list[Branch]) -> tuple[list[Branch], list[Branch]]:
        """Of a new level: what stays in the draft, and what of it is continued."""
        return fresh, fresh

    def write(self, view: View, room: int) -> Generator[Proposal, Scores, list[Branch]]:
        """A draft in which parents come first. Empty while the model still reads what is settled."""
        own = view.given(self.model, view.chunk)
        if len(own) < view.pending(self.model):
            yield Proposal(own, len(own), self.model, wants=Wants(nodes=()))
            return []
        written: list[Branch] = []
        root = Branch(token=-1, parent=-1, node=NodeId(len(own) - 1))
        graph, going = own, [root]
        for level in range(self.depth(view, room)):
            for branch in going if level else ():
                above = root if branch.parent < 0 else written[branch.parent]
                branch.node = NodeId(len(graph))
                graph = graph.grow(chain([branch.token], view.end + level - 1), at=above.node)
            asked = replace(self.asking(view), nodes=tuple(branch.node for branch in going))
            draw = Draw(purpose=self.purpose)
            scores = yield Proposal(graph, len(own), self.model, wants=asked, draw=draw)
            fresh: list[Branch] = []
            for above in going:
                fresh += self.branches(view, scores, above, view.end + level)
            kept, going = self.sift(fresh)
            for place, branch in enumerate(kept, start=len(written)):
                branch.place = place
            written += kept
            if not going:
                break
        return written


def noise_of(draw: Draw, at: int | IntArray, tokens: Sequence[int] | IntArray) -> FloatArray:
    """The noise of tokens in any order, at one position or at one for each of them."""
    ids = np.asarray(tokens, dtype=np.int64)
    return gumbel(draw, np.broadcast_to(np.asarray(at, dtype=np.int64), ids.shape), ids)


def leading(branches: list[Branch], most: int) -> list[Branch]:
    """Those with the best paths, in their old order; of equals, the first."""
    if len(branches) <= most:
        return branches
    order = sorted(range(len(branches)), key=lambda i: (-branches[i].score, i))
    return [branches[i] for i in sorted(order[:most])]


def pruned(written: list[Branch], most: int) -> list[Branch]:
    """A draft cut down to its best paths. No score exceeds its parent's: nobody loses what it hangs
    from."""
    if len(written) <= most:
        return written
    chosen = leading(written, most)
    place = {-1: -1} | {branch.place: i for i, branch in enumerate(chosen)}
    return [replace(b, place=place[b.place], parent=place[b.parent]) for b in chosen]
