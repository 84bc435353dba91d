"""`DraftTree`: a tree of drafted tokens; `AcceptanceEstimator`: how often such tokens were accepted."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from outstride.core.graph import TokenGraph, chain, drafted, tree
from outstride.core.proposal import DEFAULT_WANTS, Proposal, Wants

if TYPE_CHECKING:
    from outstride.core.prefix_key import PrefixKey
    from outstride.core.sequence import View

T = TypeVar("T")
EPS, SCALE = 1e-5, 4.0
"""A trained filter gets a probability as its logit, clipped near 0 and 1 and divided by the scale."""


def scaled_logit(logprob: float) -> float:
    """A log-probability as the input of a trained filter."""
    probability = min(max(math.exp(logprob), EPS), 1.0 - EPS)
    return math.log(probability / (1.0 - probability)) / SCALE


class AcceptanceKey(NamedTuple):
    """What a drafted node rests on: a match of some length, a rank, a depth.

    Nodes with the same key are accepted about equally often; `AcceptanceEstimator` tracks the rate.
    """

    source: str
    key: tuple[int, ...] = ()


@dataclass(slots=True)
class DraftTree:
    """Drafted tokens as a tree. Parents are indices into it, -1 for the token after the text.

    `rates` are the drafter's own estimates that a node is accepted if its parent is: a prior, which
    tracked acceptance rates replace step by step.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    keys: list[AcceptanceKey] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int, parent: int, key: AcceptanceKey, rate: float) -> int:
        """Adds a token below another; returns its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.keys.append(key)
        self.rates.append(rate)
        return len(self.tokens) - 1

    def add_run(
        self, tokens: Iterable[int], key: AcceptanceKey, rate: float, parent: int = -1
    ) -> int:
        """Adds tokens one after the other; returns the last index."""
        for token in tokens:
            parent = self.add(token, parent, key, rate)
        return parent

    def graph(self, start: int) -> TokenGraph:
        """The tree as nodes of a pass, from a position on."""
        if self.parents == list(range(-1, len(self.parents) - 1)):
            return chain(self.tokens, start)
        return tree(self.tokens, self.parents, start)

    def proposal(self, view: View, wants: Wants | None = None) -> Proposal:
        """The settled tokens and the draft after them, for the target."""
        given = view.given()
        graph = drafted(given, self.tokens, self.parents, view.end) if self.tokens else given
        return Proposal(graph, len(given), wants=wants or DEFAULT_WANTS)


class AcceptanceEstimator:
    """How often nodes of a key were accepted, given that their parents were.

    Counts fade, so that a change of subject is noticed. The rates of a single sequence start from
    those of all sequences (`base`), which count as `weight` trials.
    """

    __slots__ = ("_base", "_counts", "_weight")
    MAX_COUNT = 256.0

    def __init__(self, base: AcceptanceEstimator | None = None, weight: float = 4.0) -> None:
        self._base = base
        self._weight = weight
        self._counts: dict[AcceptanceKey, list[float]] = {}

    def rate(self, key: AcceptanceKey, prior: float) -> float:
        """The tracked acceptance rate of a key; `prior` counts as a few trials."""
        if self._base is not None:
            prior = self._base.rate(key, prior)
        found = self._counts.get(key)
        if found is None:
            return prior
        return (found[0] + self._weight * prior) / (found[1] + self._weight)

    def rates(self, keys: Iterable[AcceptanceKey], priors: Iterable[float]) -> list[float]:
        """The tracked acceptance rates of many keys."""
        if self._base is not None:
            keys = list(keys)
            priors = self._base.rates(keys, priors)
        known, weight = self._counts.get, self._weight
        return [
            prior
            if (found := known(key)) is None
            else (found[0] + weight * prior) / (found[1] + weight)
            for key, prior in zip(keys, priors, strict=True)
        ]

    def learn(self, key: AcceptanceKey, accepted: bool) -> None:
        """Counts one outcome, here and in `base`."""
        if self._base is not None:
            self._base.learn(key, accepted)
        found = self._counts.get(key)
        if found is None:
            found = self._counts[key] = [0.0, 0.0]
        found[0] += accepted
        found[1] += 1.0
        if found[1] > self.MAX_COUNT:
            found[0] *= 0.5
            found[1] *= 0.5


class PerPrefixKey(Generic[T]):
    """What a drafter remembers of earlier requests, apart for each prefix key, for the latest few.

    Requests of different tenants must not learn from each other: the time that an answer takes
    reveals what was drafted. Requests with different adapters could, but their texts differ.
    """

    def __init__(self, make: Callable[[], T], max_keys: int = 16) -> None:
        self._make = make
        self._max_keys = max_keys
        self._found: OrderedDict[PrefixKey, T] = OrderedDict()

    def peek(self, key: PrefixKey) -> T:
        """The memory under a key, or an empty one that is not kept. Changes nothing."""
        found = self._found.get(key)
        return self._make() if found is None else found

    def of(self, key: PrefixKey) -> T:
        """The memory under a key; an empty one is made and kept if there is none (any more)."""
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._make()
            while len(self._found) > self._max_keys:
                self._found.popitem(last=False)
        self._found.move_to_end(key)
        return found
