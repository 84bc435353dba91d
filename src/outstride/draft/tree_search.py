"""Search for the likeliest paths through the candidates of a draft head, as a draft tree."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import numpy as np

from outstride.core.draft_heads import BigramTable
from outstride.core.draft_tree import AcceptanceKey, DraftTree
from outstride.core.graph import FloatArray, IntArray
from outstride.core.sampling import SHARED_NOISE_SHARPNESS, SamplingSpec
from outstride.core.sequence import View
from outstride.draft.tree_expansion import noise_of

CANDIDATES = 16
"""How many candidates of each position are considered."""
MAX_DEPTH = 4
"""Acceptance estimates do not distinguish depths from here on."""


class TreeSearch:
    """Beam search, level by level from the last settled token; `width` paths go on at each level.

    bigram: corrects the logits of candidates by the token before; None: they depend on it already.
    """

    def __init__(self, view: View, bigram: BigramTable | None, width: int) -> None:
        self._view, self._bigram, self._width = view, bigram, width
        self._path_rates: list[float] = []
        """By node, level by level: the probability of the whole path down to the node."""
        self._rates: list[float] = []
        """By node: its probability if its parent holds."""
        self._parents: list[int] = []
        self._tokens: list[int] = []
        self._depths: list[int] = []
        self._depth = 0
        """How many levels there are."""
        self._ends, self._end_rates = np.asarray([-1]), np.ones(1, dtype=np.float32)
        self.last = np.asarray([view.tokens[-1]])
        """[paths]: the last token of each path that goes on."""

    def grow(self, tokens: IntArray, values: FloatArray) -> IntArray:
        """Adds a level from candidates and their logits, [candidates] for all paths or [paths,
        candidates].

        Returns, for each path that goes on, the index of the path that it continues.
        """
        tokens, scores = np.atleast_2d(tokens), np.atleast_2d(values)
        if (bigram := self._bigram) is not None:
            right = bigram.right[bigram.rows[tokens]]
            left = bigram.left[bigram.rows[self.last]]
            # Not by matmul, which wakes threads for products that end before the threads are awake.
            scores = np.einsum("...r,...cr->...c", left, right) + scores
        else:
            scores = np.broadcast_to(scores, (len(self.last), scores.shape[1]))
        rates = self._softmax(scores, tokens, self._view.end + self._depth)
        tokens = np.broadcast_to(tokens, rates.shape)
        origins, best = self._add_level(rates)
        self.last = tokens.ravel()[best]
        self._tokens += self.last.tolist()
        return origins

    def _add_level(self, rates: FloatArray) -> tuple[IntArray, IntArray]:
        """Adds the best of rates [paths, candidates]: the path of each, and its index among all."""
        path_rates = (self._end_rates[:, None] * rates).ravel()
        best = np.argsort(-path_rates, kind="stable")[: self._width]
        origins: IntArray = best // rates.shape[1]
        self._end_rates = path_rates[best]
        self._parents += self._ends[origins].tolist()
        self._rates += rates.ravel()[best].tolist()
        self._ends = len(self._path_rates) + np.arange(len(best))
        self._path_rates += self._end_rates.tolist()
        self._depths += [self._depth] * len(best)
        self._depth += 1
        return origins, best

    def all_levels(
        self, tokens: IntArray, values: FloatArray, budget: int, source: str, lib: ModuleType | None
    ) -> DraftTree:
        """The likeliest nodes of a search over candidates that do not depend on the path.

        tokens, values: [levels, candidates]. budget: how many nodes. source: the drafter, for
        acceptance estimates. lib: the compiled helpers (`core.host_library`); None: in Python.
        """
        if lib is None or self._bigram is None:
            for level, logits in zip(tokens, values, strict=True):
                self.grow(level, logits)
            return self.likeliest(budget, source)
        bigram, view, noise = self._bigram, self._view, None
        if (temperature := view.params.temperature) > 0:
            sampling, at = SamplingSpec(seed=view.seed, index=view.index), view.end
            noise = noise_of(sampling, at + np.arange(len(tokens))[:, None], tokens)
        found, parents, depths, rates = lib.paths(
            np.ascontiguousarray(tokens, dtype=np.int64),
            np.ascontiguousarray(values, dtype=np.float32),
            noise,
            bigram.rows,
            bigram.left,
            bigram.right,
            view.tokens[-1],
            len(tokens),
            self._width,
            bigram.left.shape[1],
            temperature,
            budget,
        )
        return DraftTree(found, parents, list(map(_keys(source).of, depths, rates)), rates)

    def _softmax(self, scores: FloatArray, tokens: IntArray, at: int) -> FloatArray:
        """[paths, candidates]: probabilities of the candidates of each path, at position `at`.

        Where tokens are sampled, the Gumbel noise of the position is known: it decides together
        with the logits. Draft head and target differ less than that noise spreads, hence the
        factor.
        """
        view = self._view
        if (temperature := view.params.temperature) > 0:
            sampling = SamplingSpec(seed=view.seed, index=view.index)
            noise = noise_of(sampling, at, tokens)
            scores = SHARED_NOISE_SHARPNESS * (scores / temperature + noise)
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        rates: FloatArray = powers / powers.sum(axis=1, keepdims=True)
        return rates

    def likeliest(self, budget: int, source: str) -> DraftTree:
        """The `budget` likeliest nodes of all levels; a parent is never less likely than its child."""
        path_rates, parents = self._path_rates, self._parents
        order = sorted(range(len(path_rates)), key=lambda node: -path_rates[node])
        places, chosen = {-1: -1}, list[int]()
        for node in sorted(order[:budget]):
            if parents[node] in places:
                places[node] = len(chosen)
                chosen.append(node)
        rates = [self._rates[node] for node in chosen]
        depths = [self._depths[node] for node in chosen]
        return DraftTree(
            [self._tokens[node] for node in chosen],
            [places[parents[node]] for node in chosen],
            list(map(_keys(source).of, depths, rates)),
            rates,
        )


class _Keys:
    """Acceptance keys of a drafter's nodes: by depth, and by their probability in tenths."""

    def __init__(self, source: str) -> None:
        self._known = [
            [AcceptanceKey(source, (depth, tenth)) for tenth in range(11)]
            for depth in range(MAX_DEPTH + 1)
        ]

    def of(self, depth: int, rate: float) -> AcceptanceKey:
        return self._known[min(depth, MAX_DEPTH)][int(10 * rate)]


_keys = cache(_Keys)


def chain_of(tokens: IntArray, rates: FloatArray, budget: int, source: str) -> DraftTree:
    """The draft tree of a chain [tokens] that the backend found itself, with its probabilities."""
    kept = rates.tolist()[:budget]
    return DraftTree(
        tokens.tolist()[:budget],
        list(range(-1, len(kept) - 1)),
        list(map(_keys(source).of, range(len(kept)), kept)),
        kept,
    )
