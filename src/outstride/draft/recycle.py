"""`recycle`: a table of the candidates that the target last had after each token."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outstride.core.contracts import Demand, Drafter, DraftRounds
from outstride.core.draft_tree import AcceptanceKey, DraftTree, PerPrefixKey
from outstride.core.graph import IntArray
from outstride.core.proposal import Proposal, Scores, Verdict, Wants
from outstride.core.sequence import View
from outstride.registry import method

WIDTH = 8
RANK_PRIOR = (0.42, 0.13, 0.07, 0.045, 0.03, 0.022, 0.017, 0.013)
"""The prior acceptance rate of a candidate, by its rank."""


@dataclass(frozen=True, slots=True)
class TreeTemplate:
    """A tree of ranks, level by level."""

    parents: list[int]
    levels: tuple[tuple[slice, IntArray, IntArray], ...]
    """The nodes of each depth, their parents and their ranks."""
    keys: list[AcceptanceKey]
    rates: list[float]

    @classmethod
    def best(cls, size: int, depth: int) -> TreeTemplate:
        """The `size` likeliest paths, ranks taken as independent of each other."""
        paths: list[tuple[int, ...]] = []
        heap: list[tuple[float, tuple[int, ...]]] = [
            (-c, (rank,)) for rank, c in enumerate(RANK_PRIOR)
        ]
        while heap and len(paths) < size:
            score, path = heapq.heappop(heap)
            paths.append(path)
            for rank, rate in enumerate(RANK_PRIOR if len(path) < depth else ()):
                heapq.heappush(heap, (score * rate, (*path, rank)))
        paths.sort(key=lambda path: (len(path), path))
        place = {path: i for i, path in enumerate(paths)} | {(): -1}
        parents = [place[path[:-1]] for path in paths]
        levels = []
        for level in range(1, len(paths[-1]) + 1):
            nodes = [i for i, path in enumerate(paths) if len(path) == level]
            ranks = np.asarray([paths[i][-1] for i in nodes])
            above = np.asarray([parents[i] for i in nodes])
            levels.append((slice(nodes[0], nodes[-1] + 1), above, ranks))
        return cls(
            parents,
            tuple(levels),
            keys=[AcceptanceKey("recycle", (path[-1], min(len(path), 3))) for path in paths],
            rates=[RANK_PRIOR[path[-1]] for path in paths],
        )


class SuccessorTable:
    """For each token the candidates that the target last had after it, best first; -1 for none."""

    def __init__(self) -> None:
        self.table: npt.NDArray[np.int32] = np.full((1, WIDTH), -1, dtype=np.int32)

    def learn(self, tokens: IntArray, best: IntArray) -> None:
        """Enters the candidates after tokens; of several entries for one token the last stays."""
        if not len(tokens):
            return
        highest = max(int(tokens.max()), int(best.max()))
        if highest >= len(self.table) - 1:  # the last row stays empty: index -1 reads it
            grown = np.full((max(1024, 2 * highest) + 1, WIDTH), -1, dtype=np.int32)
            grown[: len(self.table)] = self.table
            self.table = grown
        width = min(best.shape[1], WIDTH)
        self.table[tokens, :width] = best[:, :width]

    def fill(self, template: TreeTemplate, root: int) -> IntArray:
        """The tokens of a template after a root; -1 for an unknown one and for all below it."""
        flat, rows = self.table.reshape(-1), len(self.table)
        tokens = np.empty(len(template.parents) + 1, dtype=np.int64)
        tokens[-1] = root if root < rows else -1  # the parent of the first level
        for nodes, parents, ranks in template.levels:
            tokens[nodes] = flat.take(tokens.take(parents) * WIDTH + ranks, mode="wrap")
        return tokens[:-1]


@method("recycle", family="retrieval")
class Recycle(Drafter):
    """Drafts a tree from a table of each token's latest candidates, rejected passes included.

    Every scored node teaches what may follow its token. The tree has a fixed shape, wide where the
    first candidate often fails, and is filled level by level. Tenants and adapters share no table.

    Paper: Token Recycling (Luo et al., 2024)
    Exactness: exact
    Needs: nothing
    Cost per step: up to `size` further nodes, and eight candidates for each scored node; a table of
      32 bytes per token of the vocabulary
    """

    wants = Wants(best=WIDTH)

    def __init__(self, *, size: int = 48, depth: int = 6) -> None:
        if size < 1 or depth < 1:
            raise ValueError("needs size >= 1 and depth >= 1")
        self.size = size
        self.depth = depth
        self._tables = PerPrefixKey(SuccessorTable)
        self._templates: dict[tuple[int, int], TreeTemplate] = {}

    def demand(self, view: View) -> Demand:
        return Demand(max_nodes=self.size if view.limit - view.end > 1 else 0, gain=1.0)

    def _template(self, size: int, depth: int) -> TreeTemplate:
        if (size, depth) not in self._templates:
            self._templates[size, depth] = TreeTemplate.best(size, depth)
        return self._templates[size, depth]

    def draft_tree(self, view: View, budget: int) -> DraftRounds:
        yield from ()
        depth = min(self.depth, view.limit - view.end - 1)
        if depth < 1:
            return DraftTree()
        template = self._template(min(budget, self.size), depth)
        tokens = self._tables.peek(view.key).fill(template, view.tokens[-1])
        if tokens[-1] >= 0 and tokens.min() >= 0:
            return DraftTree(
                tokens.tolist(), template.parents[:], template.keys[:], template.rates[:]
            )
        draft, places = DraftTree(), {-1: -1}
        for i, token in enumerate(tokens.tolist()):
            if token >= 0:
                parent = places[template.parents[i]]
                places[i] = draft.add(token, parent, template.keys[i], template.rates[i])
        return draft

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> None:
        table = self._tables.of(view.key)
        tokens, best = proposal.graph.tokens[scores.nodes], scores.best
        table.learn(tokens, best)
        kept = np.searchsorted(scores.nodes, verdict.keep[proposal.given - 1 :])
        table.learn(tokens[kept], best[kept])  # the accepted path is entered last
