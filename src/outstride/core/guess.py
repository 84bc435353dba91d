"""`Guess`: a tree of tokens that may follow, and how often such tokens did (`Odds`)."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from outstride.core.graph import TokenGraph, chain, drafted, tree
from outstride.core.proposal import USUAL, Proposal, Wants

if TYPE_CHECKING:
    from outstride.core.sequence import View

T = TypeVar("T")
EPS, SCALE = 1e-5, 4.0
"""How a trained head is shown a probability: as log odds, cut off near 0 and 1, over this scale."""


def shown_odds(logprob: float) -> float:
    """A log-probability as a trained head is shown it."""
    chance = min(max(math.exp(logprob), EPS), 1.0 - EPS)
    return math.log(chance / (1.0 - chance)) / SCALE


class Sign(NamedTuple):
    """What a drafter went by when it guessed: a match of some length, a rank, a depth.

    Nodes with the same sign are accepted about equally often; `Odds` finds out how often.
    """

    source: str
    key: tuple[int, ...] = ()


@dataclass(slots=True)
class Guess:
    """Drafted tokens as a tree. Parents are indices into it, -1 for what follows at once.

    `chances` are the drafter's own estimates that a node holds if its parent does: a first word,
    which tracked odds replace as they come in.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    signs: list[Sign] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int, parent: int, sign: Sign, chance: float) -> int:
        """Adds a token below another; returns its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.signs.append(sign)
        self.chances.append(chance)
        return len(self.tokens) - 1

    def add_run(self, tokens: Iterable[int], sign: Sign, chance: float, parent: int = -1) -> int:
        """Adds tokens one behind the other; returns the last index."""
        for token in tokens:
            parent = self.add(token, parent, sign, chance)
        return parent

    def graph(self, start: int) -> TokenGraph:
        """The tree as nodes of a pass, from a position on."""
        if self.parents == list(range(-1, len(self.parents) - 1)):
            return chain(self.tokens, start)
        return tree(self.tokens, self.parents, start)

    def proposal(self, view: View, wants: Wants | None = None) -> Proposal:
        """The settled tokens and the guess behind them, for the target."""
        given = view.given()
        graph = drafted(given, self.tokens, self.parents, view.end) if self.tokens else given
        return Proposal(graph, len(given), wants=wants or USUAL)


class Odds:
    """How often nodes of a sign held, given that what they hang from did.

    Counts fade, so that a change of subject is noticed. Odds of a single sequence rest on those of
    everybody (`base`) until it has seen enough of its own.
    """

    __slots__ = ("_base", "_counts", "_weight")
    MOST = 256.0

    def __init__(self, base: Odds | None = None, weight: float = 4.0) -> None:
        self._base = base
        self._weight = weight
        self._counts: dict[Sign, list[float]] = {}

    def chance(self, sign: Sign, prior: float) -> float:
        """The tracked chance of a sign; `prior` counts as a few trials."""
        if self._base is not None:
            prior = self._base.chance(sign, prior)
        found = self._counts.get(sign)
        if found is None:
            return prior
        return (found[0] + self._weight * prior) / (found[1] + self._weight)

    def chances(self, signs: Iterable[Sign], priors: Iterable[float]) -> list[float]:
        """The same for many at once."""
        if self._base is not None:
            signs = list(signs)
            priors = self._base.chances(signs, priors)
        known, weight = self._counts.get, self._weight
        return [
            prior
            if (found := known(sign)) is None
            else (found[0] + weight * prior) / (found[1] + weight)
            for sign, prior in zip(signs, priors, strict=True)
        ]

    def learn(self, sign: Sign, held: bool) -> None:
        """Enters one outcome, here and in what this rests on."""
        if self._base is not None:
            self._base.learn(sign, held)
        found = self._counts.get(sign)
        if found is None:
            found = self._counts[sign] = [0.0, 0.0]
        found[0] += held
        found[1] += 1.0
        if found[1] > self.MOST:
            found[0] *= 0.5
            found[1] *= 0.5


class PerTenant(Generic[T]):
    """What a drafter remembers of earlier requests, apart for each salt, for the latest few salts.

    Requests with different salts must not learn from each other: what a draft proposes shows in the
    time that an answer takes.
    """

    def __init__(self, make: Callable[[], T], most: int = 16) -> None:
        self._make = make
        self._most = most
        self._found: OrderedDict[str, T] = OrderedDict()

    def of(self, salt: str) -> T:
        """A tenant's memory, made anew if it is not known (any more)."""
        if salt not in self._found:
            self._found[salt] = self._make()
            while len(self._found) > self._most:
                self._found.popitem(last=False)
        self._found.move_to_end(salt)
        return self._found[salt]
