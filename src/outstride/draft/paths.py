"""The likeliest paths through what a trained part says of each position, as a tree."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import numpy as np

from outstride.core.contracts import Graft
from outstride.core.graph import FloatArray, IntArray
from outstride.core.guess import Guess, Sign
from outstride.core.sampling import Draw
from outstride.core.sequence import View
from outstride.draft.writer import noise_of

CANDIDATES = 16
"""So many tokens of each position are looked at."""
DEEPEST = 4
"""From this depth on, depths are not told apart."""


class Paths:
    """Grows level by level behind the last settled token; `width` paths go on at each of them."""

    def __init__(self, view: View, graft: Graft, width: int) -> None:
        self._view, self._graft, self._width = view, graft, width
        self._reached: list[float] = []
        """By node, level by level: how likely it is that a path comes here."""
        self._chances: list[float] = []
        """By node: how likely it is if its parent holds."""
        self._parents: list[int] = []
        self._tokens: list[int] = []
        self._depths: list[int] = []
        self._depth = 0
        """How many levels there are."""
        self._ends, self._so_far = np.asarray([-1]), np.ones(1, dtype=np.float32)
        self.last = np.asarray([view.tokens[-1]])
        """The tokens at the ends of the paths."""

    def grow(self, tokens: IntArray, values: FloatArray) -> IntArray:
        """One more level: candidates and their logits, a row for each path or one for all of them.

        Returns, for each path that goes on, which one of the level before it comes from.
        """
        tokens, graft = np.atleast_2d(tokens), self._graft
        after = graft.after[graft.rows[tokens]]
        before = graft.before[graft.rows[self.last]]
        # Not by matmul, which wakes threads for products that are over before these are awake.
        scores = np.einsum("...r,...cr->...c", before, after) + np.atleast_2d(values)
        own = self._softened(scores, tokens, self._view.end + self._depth)
        tokens = np.broadcast_to(tokens, own.shape)
        origins, best = self._level(own)
        self.last = tokens.ravel()[best]
        self._tokens += self.last.tolist()
        return origins

    def _level(self, own: FloatArray) -> tuple[IntArray, IntArray]:
        """Adds the best of a level: where each comes from, and its place among all candidates."""
        reached = (self._so_far[:, None] * own).ravel()
        best = np.argsort(-reached, kind="stable")[: self._width]
        origins: IntArray = best // own.shape[1]
        self._so_far = reached[best]
        self._parents += self._ends[origins].tolist()
        self._chances += own.ravel()[best].tolist()
        self._ends = len(self._reached) + np.arange(len(best))
        self._reached += self._so_far.tolist()
        self._depths += [self._depth] * len(best)
        self._depth += 1
        return origins, best

    def through(
        self, tokens: IntArray, values: FloatArray, room: int, source: str, lib: ModuleType | None
    ) -> Guess:
        """All levels at once, where candidates do not depend on the path: a row for each level.

        The `room` likeliest nodes of them; with the host's library (`core.host`), in compiled code.
        """
        if lib is None:
            for level, scores in zip(tokens, values, strict=True):
                self.grow(level, scores)
            return self.guess(room, source)
        graft, view, noise = self._graft, self._view, None
        if (warmth := view.params.temperature) > 0:
            draw, at = Draw(seed=view.seed, index=view.index), view.end
            noise = noise_of(draw, at + np.arange(len(tokens))[:, None], tokens)
        found, parents, depths, chances = lib.paths(
            np.ascontiguousarray(tokens, dtype=np.int64),
            np.ascontiguousarray(values, dtype=np.float32),
            noise,
            graft.rows,
            graft.before,
            graft.after,
            view.tokens[-1],
            len(tokens),
            self._width,
            graft.before.shape[1],
            warmth,
            room,
        )
        return Guess(found, parents, list(map(_signs(source).of, depths, chances)), chances)

    def _softened(self, scores: FloatArray, tokens: IntArray, at: int) -> FloatArray:
        """The chances of candidates by their scores, noise included, a row for each path."""
        view = self._view
        if (warmth := view.params.temperature) > 0:
            draw = Draw(seed=view.seed, index=view.index)
            noise = noise_of(draw, at, tokens)
            scores = 2.0 * (scores / warmth + noise)
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        chances: FloatArray = powers / powers.sum(axis=1, keepdims=True)
        return chances

    def guess(self, room: int, source: str) -> Guess:
        """The `room` likeliest nodes of all levels; a parent is never less likely than its child."""
        reached, parents = self._reached, self._parents
        order = sorted(range(len(reached)), key=lambda node: -reached[node])
        places, chosen = {-1: -1}, list[int]()
        for node in sorted(order[:room]):
            if parents[node] in places:
                places[node] = len(chosen)
                chosen.append(node)
        chances = [self._chances[node] for node in chosen]
        depths = [self._depths[node] for node in chosen]
        return Guess(
            [self._tokens[node] for node in chosen],
            [places[parents[node]] for node in chosen],
            list(map(_signs(source).of, depths, chances)),
            chances,
        )


class _Signs:
    """What a part's nodes go by: how deep they are and how sure it is, a dozen signs for each step."""

    def __init__(self, source: str) -> None:
        self._known = [
            [Sign(source, (depth, about)) for about in range(11)] for depth in range(DEEPEST + 1)
        ]

    def of(self, depth: int, chance: float) -> Sign:
        return self._known[min(depth, DEEPEST)][int(10 * chance)]


_signs = cache(_Signs)


def chained(tokens: IntArray, chances: FloatArray, room: int, source: str) -> Guess:
    """A chain that the part's operations found themselves."""
    sure = chances.tolist()[:room]
    return Guess(
        tokens.tolist()[:room],
        list(range(-1, len(sure) - 1)),
        list(map(_signs(source).of, range(len(sure)), sure)),
        sure,
    )
