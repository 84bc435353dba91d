"""The likeliest paths through what a trained part says of each position, as a tree."""

from __future__ import annotations

import numpy as np

from outstride.core.contracts import Graft
from outstride.core.graph import FloatArray, IntArray
from outstride.core.guess import Guess, Sign
from outstride.core.sampling import Draw
from outstride.core.sequence import View
from outstride.draft.writer import noise_of

CANDIDATES = 16
"""So many tokens of each position are looked at."""


class Paths:
    """Grows level by level behind the last settled token; `width` paths go on at each of them."""

    def __init__(self, view: View, graft: Graft, width: int) -> None:
        self._view, self._graft, self._width = view, graft, width
        self._levels: list[tuple[FloatArray, FloatArray, IntArray, IntArray]] = []
        self._count = 0
        self._nodes, self._reached = np.asarray([-1]), np.ones(1, dtype=np.float32)
        self.last = np.asarray([view.tokens[-1]])
        """The tokens at the ends of the paths."""

    def grow(self, tokens: IntArray, values: FloatArray) -> IntArray:
        """One more level: candidates and their logits, a row for each path or one for all of them.

        Returns, for each path that goes on, which one of the level before it comes from.
        """
        tokens = np.atleast_2d(tokens)
        own = self._chances(tokens, np.atleast_2d(values), self._view.end + len(self._levels))
        tokens = np.broadcast_to(tokens, own.shape)
        reached = (self._reached[:, None] * own).ravel()
        best = np.argsort(-reached, kind="stable")[: self._width]
        origins: IntArray = best // tokens.shape[1]
        self.last = tokens.ravel()[best]
        self._levels.append((reached[best], own.ravel()[best], self._nodes[origins], self.last))
        self._nodes, self._reached = self._count + np.arange(len(best)), reached[best]
        self._count += len(best)
        return origins

    def through(self, tokens: IntArray, values: FloatArray) -> None:
        """All levels at once, where candidates do not depend on the path: a row for each level.

        What each candidate is worth behind each one of the level before is worked out together.
        """
        graft, view = self._graft, self._view
        rows = graft.rows[tokens]
        before, after = graft.before[rows[:-1]], graft.after[rows]
        first = graft.before[graft.rows[self.last]] @ after[0].T
        scores = np.empty((len(tokens), *first.shape[1:] * 2), dtype=np.float32)
        scores[0], scores[1:] = first, np.matmul(before, after[1:].transpose(0, 2, 1))
        scores += values[:, None]
        if (warmth := view.params.temperature) > 0:
            draw, at = Draw(seed=view.seed, index=view.index), view.end
            noise = np.stack([noise_of(draw, at + i, row) for i, row in enumerate(tokens)])
            scores = 2.0 * (scores / warmth + noise[:, None])
        scores -= scores.max(axis=2, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=2, keepdims=True)
        width, size, held = self._width, tokens.shape[1], np.zeros(1, dtype=np.int64)
        for level, own in zip(tokens, scores, strict=True):
            chances = own[held]
            reached = (self._reached[:, None] * chances).ravel()
            best = np.argsort(-reached, kind="stable")[:width]
            self._reached, held = reached[best], best % size
            self.last = level[held]
            parents = self._nodes[best // size]
            self._levels.append((self._reached, chances.ravel()[best], parents, self.last))
            self._nodes = self._count + np.arange(len(best))
            self._count += len(best)

    def _chances(self, tokens: IntArray, values: FloatArray, at: int) -> FloatArray:
        """The chance of each candidate behind each of the tokens before it, noise included."""
        graft, view = self._graft, self._view
        before = graft.before[graft.rows[self.last]]
        after = graft.after[graft.rows[tokens]].transpose(0, 2, 1)
        scores = values + np.matmul(before[:, None], after)[:, 0]
        if (warmth := view.params.temperature) > 0:
            draw = Draw(seed=view.seed, index=view.index)
            noise = np.stack([noise_of(draw, at, row) for row in tokens])
            scores = 2.0 * (scores / warmth + noise)
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        chances: FloatArray = powers / powers.sum(axis=1, keepdims=True)
        return chances

    def guess(self, room: int, source: str) -> Guess:
        """The `room` likeliest nodes of all levels; a parent is never less likely than its child."""
        guess, places, node = Guess(), {-1: -1}, 0
        if not self._levels:
            return guess
        reached = np.concatenate([level[0] for level in self._levels])
        keep = np.zeros(len(reached), dtype=np.bool_)
        keep[np.argsort(-reached, kind="stable")[:room]] = True
        for depth, (_, chances, parents, tokens) in enumerate(self._levels):
            for chance, parent, token in zip(
                chances.tolist(), parents.tolist(), tokens.tolist(), strict=True
            ):
                if keep[node] and parent in places:
                    sign = Sign(source, (min(depth, 4), int(10 * chance)))
                    places[node] = guess.add(token, places[parent], sign, chance)
                node += 1
        return guess
