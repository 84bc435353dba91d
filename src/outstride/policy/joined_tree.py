"""One draft tree from several drafters, with the estimated rate at which each node is reached."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from outstride.core.draft_tree import AcceptanceEstimator, AcceptanceKey, DraftTree
from outstride.policy.config import DEFAULT_CONFIG, AutoConfig

ALONE, JOINED, CONTRADICTED = -3, -2, -1
"""First elements of acceptance keys that are made here, so that they differ from drafters' own keys."""


@dataclass(slots=True)
class JoinedTree:
    """The trees of several drafters as one, with the rate at which each node is reached."""

    tree: DraftTree
    claims: list[tuple[AcceptanceKey, ...]]
    """By node: the keys of the drafters that proposed it."""
    children: dict[int, list[int]]
    order: list[int]
    """Nodes, best first: parents always come before their children."""
    gains: list[float]
    """The rates at which they are reached, in that order."""

    @classmethod
    def of(
        cls,
        trees: Sequence[DraftTree],
        estimator: AcceptanceEstimator,
        config: AutoConfig = DEFAULT_CONFIG,
    ) -> JoinedTree:
        """Merges equal nodes. A node that contradicts a likelier sibling gets the rate that is left."""
        if len(trees) == 1:
            return cls._of_one(trees[0], estimator, config)
        tokens: list[int] = []
        parents: list[int] = []
        rates: list[float] = []
        claims: list[tuple[AcceptanceKey, ...]] = []
        children: dict[int, list[int]] = {}
        known: dict[tuple[int, int], int] = {}
        for tree in trees:
            nodes: list[int] = []
            own = _rates(estimator, tree.keys, tree.rates)
            for token, parent, key, rate in zip(
                tree.tokens, tree.parents, tree.keys, own, strict=True
            ):
                above = nodes[parent] if parent >= 0 else -1
                node = known.get((above, token))
                if node is None:
                    node = known[above, token] = len(tokens)
                    tokens.append(token)
                    parents.append(above)
                    rates.append(rate)
                    claims.append((key,))
                    children.setdefault(above, []).append(node)
                else:
                    claims[node] += (key,)
                    rates[node] = 1.0 - (1.0 - rates[node]) * (1.0 - rate)
                nodes.append(node)
        sources = ["+".join([key.source for key in keys]) for keys in claims]
        keys = [
            _joined_key(source, bucket_of(rate, config))
            for source, rate in zip(sources, rates, strict=True)
        ]
        rates = _rates(estimator, keys, rates)
        for siblings in children.values():
            if len(siblings) > 1:
                _discount(siblings, keys, rates, estimator, config)
        joined = DraftTree(tokens, parents, keys, rates)
        return cls(joined, claims, children, *_ranked(parents, rates, config.min_node_rate))

    @classmethod
    def _of_one(
        cls, tree: DraftTree, estimator: AcceptanceEstimator, config: AutoConfig
    ) -> JoinedTree:
        """A single drafter's tree: there is nothing to merge and nothing to contradict."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents):
            children.setdefault(parent, []).append(node)
        keys = list(map(_lone_key, tree.keys))
        rates = _rates(estimator, keys, tree.rates)
        mine = DraftTree(tree.tokens, tree.parents, keys, rates)
        claims: list[tuple[AcceptanceKey, ...]] = [(key,) for key in tree.keys]
        return cls(mine, claims, children, *_ranked(tree.parents, rates, config.min_node_rate))

    def best(self, count: int) -> DraftTree:
        """The `count` best nodes as a tree of their own."""
        tree, chosen = self.tree, self.order[:count]
        places = {node: place for place, node in enumerate(chosen)} | {-1: -1}
        return DraftTree(
            [tree.tokens[node] for node in chosen],
            [places[tree.parents[node]] for node in chosen],
            [tree.keys[node] for node in chosen],
            [tree.rates[node] for node in chosen],
        )

    def learn(self, tokens: Sequence[int], estimator: AcceptanceEstimator) -> None:
        """Compares with the settled tokens: every proposed node on their path was right or wrong,
        whether it was drafted or not."""
        node = -1
        for settled in tokens:
            reached = None
            for child in self.children.get(node, ()):
                accepted = self.tree.tokens[child] == settled
                estimator.learn(self.tree.keys[child], accepted)
                for key in self.claims[child]:
                    if key is not self.tree.keys[child]:
                        estimator.learn(key, accepted)
                if accepted:
                    reached = child
            if reached is None:
                return
            node = reached


def _ranked(
    parents: list[int], rates: list[float], min_rate: float
) -> tuple[list[int], list[float]]:
    """Nodes by the rate at which they are reached, unless that is too low, and these rates."""
    gains: list[float] = []
    for parent, rate in zip(parents, rates, strict=True):
        gains.append(rate * gains[parent] if parent >= 0 else rate)
    order = [node for node, gain in enumerate(gains) if gain >= min_rate]
    order.sort(key=gains.__getitem__, reverse=True)
    return order, [gains[node] for node in order]


def bucket_of(rate: float, config: AutoConfig = DEFAULT_CONFIG) -> int:
    """A rate on a coarse scale that is fine where rates are small.

    Estimates that rest on other estimates are combined as if these were independent. They are corrected
    by how often such estimates came true, which needs few groups of them.
    """
    return round(config.rate_buckets * math.sqrt(max(rate, 0.0)))


@cache
def _lone_key(key: AcceptanceKey) -> AcceptanceKey:
    """The key of a node where no other drafter proposed anything."""
    return AcceptanceKey(key.source, (ALONE, *key.key))


@cache
def _joined_key(source: str, bucket: int) -> AcceptanceKey:
    """The key of a node whose rate combines other estimates: made once, needed at each step."""
    return AcceptanceKey(source, (JOINED, bucket))


def _discount(
    siblings: list[int],
    keys: list[AcceptanceKey],
    rates: list[float],
    estimator: AcceptanceEstimator,
    config: AutoConfig,
) -> None:
    """Drafters that contradict each other cannot all be right: the likelier one comes first."""
    siblings = sorted(siblings, key=lambda node: -rates[node])
    taken: dict[str, float] = {}
    total = 0.0
    for node in siblings:
        key = keys[node]
        others = total - taken.get(key.source, 0.0)
        if others > config.min_sibling_overlap:
            left = rates[node] * max(1.0 - others, 0.0)
            keys[node] = AcceptanceKey(key.source, (CONTRADICTED, bucket_of(left, config)))
            rates[node] = estimator.rate(keys[node], left)
        taken[key.source] = taken.get(key.source, 0.0) + rates[node]
        total += rates[node]


def _rates(
    estimator: AcceptanceEstimator, keys: Iterable[AcceptanceKey], priors: Iterable[float]
) -> list[float]:
    """The estimated acceptance rates of nodes with these keys."""
    return estimator.rates(keys, priors)
