"""Token recycling: what the target once thought might follow a token, it may think again."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outstride.core.contracts import Demand, Drafter, Guessing
from outstride.core.graph import IntArray
from outstride.core.guess import Guess, PerTenant, Sign
from outstride.core.proposal import Proposal, Scores, Verdict, Wants
from outstride.core.sequence import View
from outstride.registry import method

WIDTH = 8
CHANCES = (0.42, 0.13, 0.07, 0.045, 0.03, 0.022, 0.017, 0.013)
"""First word on how often the token of a rank is the one that follows."""


@dataclass(frozen=True, slots=True)
class Template:
    """A tree of ranks, level by level."""

    parents: list[int]
    levels: tuple[tuple[slice, IntArray, IntArray], ...]
    """The nodes of each depth, their parents and their ranks."""
    signs: list[Sign]
    chances: list[float]

    @classmethod
    def best(cls, size: int, depth: int) -> Template:
        """The `size` likeliest paths, ranks taken as independent of each other."""
        paths: list[tuple[int, ...]] = []
        heap: list[tuple[float, tuple[int, ...]]] = [
            (-c, (rank,)) for rank, c in enumerate(CHANCES)
        ]
        while heap and len(paths) < size:
            score, path = heapq.heappop(heap)
            paths.append(path)
            for rank, chance in enumerate(CHANCES if len(path) < depth else ()):
                heapq.heappush(heap, (score * chance, (*path, rank)))
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
            signs=[Sign("recycle", (path[-1], min(len(path), 3))) for path in paths],
            chances=[CHANCES[path[-1]] for path in paths],
        )


class Successors:
    """For each token the candidates that the target last saw behind it, best first; -1 for none."""

    def __init__(self) -> None:
        self.table: npt.NDArray[np.int32] = np.full((1, WIDTH), -1, dtype=np.int32)

    def learn(self, tokens: IntArray, best: IntArray) -> None:
        """Enters the candidates behind tokens; of several for one token the last ones stay."""
        if not len(tokens):
            return
        highest = max(int(tokens.max()), int(best.max()))
        if highest >= len(self.table) - 1:  # the last row stays empty: it is what -1 leads to
            grown = np.full((max(1024, 2 * highest) + 1, WIDTH), -1, dtype=np.int32)
            grown[: len(self.table)] = self.table
            self.table = grown
        width = min(best.shape[1], WIDTH)
        self.table[tokens, :width] = best[:, :width]

    def fill(self, template: Template, root: int) -> IntArray:
        """The tokens of a template behind a root; below a gap there are only gaps (-1)."""
        flat, rows = self.table.reshape(-1), len(self.table)
        tokens = np.empty(len(template.parents) + 1, dtype=np.int64)
        tokens[-1] = root if root < rows else -1  # where the parents of the first level point to
        for nodes, parents, ranks in template.levels:
            tokens[nodes] = flat.take(tokens.take(parents) * WIDTH + ranks, mode="wrap")
        return tokens[:-1]


@method("recycle", family="retrieval")
class Recycle(Drafter):
    """Drafts a tree from a table of each token's latest candidates, rejected passes included.

    Every scored node teaches what may follow its token. The tree has a fixed shape, wide where the
    first candidate often fails, and is filled level by level. Tenants (salts) share no table.

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
        self._tables = PerTenant(Successors)
        self._templates: dict[tuple[int, int], Template] = {}

    def demand(self, view: View) -> Demand:
        return Demand(most=self.size if view.limit - view.end > 1 else 0, gain=1.0)

    def _template(self, size: int, depth: int) -> Template:
        if (size, depth) not in self._templates:
            self._templates[size, depth] = Template.best(size, depth)
        return self._templates[size, depth]

    def guess(self, view: View, room: int) -> Guessing:
        yield from ()
        depth = min(self.depth, view.limit - view.end - 1)
        if depth < 1:
            return Guess()
        template = self._template(min(room, self.size), depth)
        tokens = self._tables.of(view.salt).fill(template, view.tokens[-1])
        if tokens[-1] >= 0 and tokens.min() >= 0:
            return Guess(
                tokens.tolist(), template.parents[:], template.signs[:], template.chances[:]
            )
        guess, places = Guess(), {-1: -1}
        for i, token in enumerate(tokens.tolist()):
            if token >= 0:
                parent = places[template.parents[i]]
                places[i] = guess.add(token, parent, template.signs[i], template.chances[i])
        return guess

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> None:
        table = self._tables.of(view.salt)
        tokens, best = proposal.graph.tokens[scores.nodes], scores.best
        table.learn(tokens, best)
        kept = np.searchsorted(scores.nodes, verdict.keep[proposal.given - 1 :])
        table.learn(tokens[kept], best[kept])  # what holds has the last word
