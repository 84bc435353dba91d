"""Two tokens of text, drafted and judged many times at once by the acceptors' own rules.

Small vocabularies, logits of the toy and of its draft model; one row per trial. Whatever a rule does
not settle is drawn from the target, as the next step would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outstride.accept.rejection_sampling import Picked, Rows
from outstride.core.graph import IntArray
from outstride.core.sampling import SamplingSpec, probabilities
from outstride.models.toy import Toy
from tests.accept.chi_square import p_value

TRIALS = 100_000
HABIT = 3.5
"""Low, so that target and draft model differ: otherwise a fault in the correction would not show."""
Rule = Callable[[Rows, Rows, IntArray, Rows], Picked]


@dataclass
class Pair:
    """The distributions of a target and a draft model over three tokens."""

    p: list[Rows]
    """By depth; the shape is the vocabulary's, once more than the depth."""
    q: list[Rows]

    @property
    def size(self) -> int:
        return len(self.p[0])

    def expected(self, depth: int) -> Rows:
        """The probability of each text of `depth` tokens."""
        joint = self.p[0]
        for rows in self.p[1:depth]:
            joint = joint[..., None] * rows
        return joint


def pair(size: int = 16, top_p: float = 1.0, depth: int = 3, seed: int = 0) -> Pair:
    """The distributions of the toy and its draft model after some prompt."""
    draw = SamplingSpec(temperature=1.0, top_p=top_p)
    states = np.random.default_rng(seed).integers(1 << 60, size=size**depth).astype(np.uint64)
    models = []
    for accent in (0, 1):
        toy, rows = Toy(vocab_size=size, accent=accent, habit=HABIT), []
        for level in range(depth):
            count = size**level
            raw = toy.logits(np.arange(count) % size, states[:count])
            found = np.asarray([probabilities(row, draw) for row in raw], dtype=np.float64)
            rows.append(found.reshape((size,) * (level + 1)))
        models.append(rows)
    return Pair(*models)


class Trials:
    """Many independent trials."""

    def __init__(self, pair: Pair, count: int = TRIALS, seed: int = 1) -> None:
        self.pair = pair
        self.count = count
        self.rng = np.random.default_rng(seed)

    def uniform(self, *shape: int) -> Rows:
        return self.rng.random(shape)

    def noise(self, *shape: int) -> Rows:
        return self.rng.gumbel(size=shape)

    def drawn(self, rows: Rows) -> IntArray:
        """One token for each row, in proportion to it."""
        sums = np.cumsum(rows, axis=1)
        found: IntArray = (sums <= self.uniform(len(rows), 1) * sums[:, -1:]).sum(axis=1)
        return found

    def without(self, rows: Rows, count: int) -> tuple[IntArray, Rows]:
        """Candidates without replacement, in order, and all perturbed values."""
        values = perturbed(rows, self.noise(*rows.shape))
        return np.argsort(-values, axis=1)[:, :count], values

    def independent(self, rows: Rows, count: int) -> IntArray:
        """Candidates that may come again."""
        return np.stack([self.drawn(rows) for _ in range(count)], axis=1)

    def settle(self, taken: IntArray, rest: Rows, tokens: IntArray) -> IntArray:
        """The token that a rule settles: a candidate, or a sample of the residual."""
        count = tokens.shape[1]
        chosen = tokens[np.arange(len(tokens)), np.minimum(taken, count - 1)]
        return np.where(taken < count, chosen, self.drawn(rest))

    def judge(self, first: IntArray, second: IntArray) -> float:
        """The p-value of the texts that came out."""
        size = self.pair.size
        seen = np.bincount(first * size + second, minlength=size**2)
        return p_value(seen, self.pair.expected(2).ravel() * self.count)


def perturbed(rows: Rows, noise: Rows) -> Rows:
    with np.errstate(divide="ignore"):
        values: Rows = np.log(rows) + noise
    return values


def support(row: npt.NDArray[np.float64]) -> int:
    return int((row > 0).sum())


def tree_of(
    trials: Trials, rule: Rule, width: int, *, again: bool, planted: str = ""
) -> tuple[IntArray, IntArray]:
    """`width` candidates for the first token, and after the accepted one for the second."""
    pair, n = trials.pair, trials.count

    def level(p: Rows, q: Rows, cases: int) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        count = width if again else min(width, support(q))
        many_p, many_q = np.broadcast_to(p, (cases, len(p))), np.broadcast_to(q, (cases, len(q)))
        noise = trials.noise(cases, len(q))
        tokens = np.argsort(-perturbed(many_q, noise), axis=1)[:, :count]
        if again:
            tokens = trials.independent(many_q, count)
        draws = trials.uniform(cases, count)
        if planted == "the drafter's noise":
            draws = np.exp(-np.exp(-np.take_along_axis(noise, tokens, axis=1)))
        taken, rest = rule(many_p, many_q, tokens, draws)
        if planted == "no residual":
            rest = many_p
        return trials.settle(taken, rest, tokens), taken < count

    first, drafted = level(pair.p[0], pair.q[0], n)
    second = trials.drawn(pair.p[1][first])
    for token in np.unique(first):
        below = np.flatnonzero((first == token) & drafted)
        second[below], _ = level(pair.p[1][token], pair.q[1][token], len(below))
    return first, second
