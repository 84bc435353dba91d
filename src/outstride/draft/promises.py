"""What drafts promise, believed as far as earlier promises of that kind were kept."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

PROMISES = tuple(0.6 * 0.78**i for i in range(16))
"""First word on what the nodes of a tree promise that a trained part took part in."""
KINDS = (0.15, 0.5, 1.0, 2.0)
"""Where what was looked up promises so many tokens, the next kind of step begins."""
FIRST_NODES = 8
"""So many nodes of a tree are asked for what it promises."""


def kind_of(gains: Sequence[float]) -> int:
    """Which kind of step it is, by the gains of what was looked up.

    A trained part is asked where little was found: what it promised there says little of steps in
    which much was found, and the other way round.
    """
    return bisect(KINDS, sum(gains[:FIRST_NODES]))


def affordable(gains: Sequence[float], prices: Sequence[float]) -> int:
    """How many nodes, best first, promise most beyond what they cost.

    Where a tile of the pass is full, the next node is dear and those behind it are cheap: it is the
    sum that counts.
    """
    count, best, total = 0, 0.0, 0.0
    for place, (gain, price) in enumerate(zip(gains, prices, strict=False), start=1):
        total += gain - price
        if total > best:
            count, best = place, total
    return count


class Kept:
    """How many drafted tokens held beside how many were promised; `share` of them at first.

    What a single sequence has seen rests on what everybody has (`base`).
    """

    MEMORY, KEEP, FIRST, MOST, COMMON = 0.98, 0.985, 10.0, 1.0, 1.0
    """What is left of old steps after a new one, and after one without a draft; how many promised
    tokens the first word counts as; the most that is believed; and how much of the first word is what
    everybody has seen."""

    def __init__(self, base: Kept | None = None, share: float = 1.0) -> None:
        self._base = base
        self._promised, self._held = 0.0, 0.0
        self._share: float = base._share if base is not None else share

    @property
    def trust(self) -> float:
        """What a promised token is worth."""
        before = self._share
        if self._base is not None:
            before += self.COMMON * (self._base.trust - before)
        return (self._held + self.FIRST * before) / (self._promised + self.FIRST)

    @property
    def common(self) -> float:
        """What it is worth to everybody."""
        return self._share if self._base is None else self._base.trust

    def settle(self, promised: float, held: int) -> None:
        """Enters how many tokens a draft promised, and how many of them held."""
        if self._base is not None:
            self._base.settle(promised, held)
        self._promised = self.MEMORY * self._promised + promised
        self._held = self.MEMORY * self._held + held

    def fade(self, steps: int = 1) -> None:
        """Nobody drafted: in time, the first word counts again, for texts change."""
        left = self.KEEP**steps
        self._promised, self._held = left * self._promised, left * self._held

    def believed(self, gains: Sequence[float]) -> tuple[float, ...]:
        """What of these gains is to be believed."""
        trust = min(self.trust, self.MOST)
        return tuple([trust * gain for gain in gains])


class Forecast(Kept):
    """What the nodes of a tree promised of late, best first: a falling average of trees.

    Every sequence begins with the first word, whatever became of others: they differ, and to ask in
    vain for some steps costs less than never to ask.
    """

    QUICK, FADE, FIRST, COMMON = 0.15, 0.01, 4.0, 0.7

    def __init__(self, base: Forecast | None = None, share: float = 1.0) -> None:
        super().__init__(base, share)
        self.gains: list[float] = list(PROMISES)

    def learn(self, gains: Sequence[float]) -> None:
        """Enters a tree's gains, falling."""
        mine, quick = self.gains, self.QUICK
        padded = [*gains[: len(mine)], *[0.0] * (len(mine) - len(gains))]
        self.gains = [own + quick * (gain - own) for own, gain in zip(mine, padded, strict=True)]

    def fade(self, steps: int = 1) -> None:
        """Nobody asked: in time, the first word counts again, and somebody asks."""
        super().fade(steps)
        mine, fade = self.gains, 1.0 - (1.0 - self.FADE) ** steps
        self.gains = [own + fade * (first - own) for own, first in zip(mine, PROMISES, strict=True)]


class Chains(Kept):
    """How many tokens of a part's chain hold, where it drafts chains and nothing else.

    That is more or less from step to step, so it is a mean over many.
    """

    MEMORY, FIRST, COMMON = 0.96, 4.0, 0.5

    def gains(self, depth: int) -> tuple[float, ...]:
        """What the nodes of a chain promise."""
        each = self.trust / (1.0 + self.trust)
        return tuple([each ** (i + 1) for i in range(depth)])


class Promises:
    """What a trained part promises if it is asked, and what is looked up otherwise.

    Sequences differ most, so the part's promises are tracked for each of them. How much more or less
    it promises in a kind of step than on the whole, everybody finds out together.
    """

    QUICK, LEAST, MOST = 0.05, 0.4, 2.5

    def __init__(self, base: Promises | None = None, share: float = 1.0) -> None:
        self.asked: Forecast = Forecast(base.asked if base else None, share)
        self.chains: Chains = Chains(base.chains if base else None, share)
        kinds = range(len(KINDS) + 1)
        self.looked: list[Kept] = [Kept(base.looked[kind] if base else None) for kind in kinds]
        self._weights: list[float] = base._weights if base else [1.0 for _ in kinds]

    def learn(self, kind: int, gains: Sequence[float]) -> None:
        """Enters the gains of a tree that a trained part took part in."""
        usual, weight = sum(self.asked.gains[:FIRST_NODES]), self._weights[kind]
        found = min(max(sum(gains[:FIRST_NODES]) / max(usual, 0.01), self.LEAST), self.MOST)
        self.asked.learn([gain / weight for gain in gains])
        self._weights[kind] += self.QUICK * (found - weight)

    def settle(self, kind: int, promised: float, held: int, asked: bool) -> None:
        """Enters what became of a draft."""
        kept: Kept = self.asked if asked else self.looked[kind]
        kept.settle(promised, held)

    def asking(self, kind: int, gains: Sequence[float]) -> tuple[float, ...]:
        """What a tree promises that the part takes part in, beside what was looked up."""
        weight = self._weights[kind]
        mine = [min(weight * gain, 1.0) for gain in self.asked.believed(self.asked.gains)]
        both = min(len(mine), len(gains))
        return (*map(max, mine[:both], gains[:both]), *mine[both:], *gains[both:])
