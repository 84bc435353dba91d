"""Chi-square tests of whether sampled tokens follow the target's distribution, and the power of the
tests.

The distribution of each token given the text before it is known: it is the target's own. So every
token becomes a number: the mass of all more likely tokens plus a random share of its own mass. If
the tokens follow the distribution, these numbers are uniform and independent, whatever the model,
the prompt and the vocabulary. Three chi-square tests check that:

- `ranks`: does each sixteenth occur equally often? A rule that prefers likely tokens fails here.
- `neighbours`: are consecutive tokens independent, given the text?
- `samples`: are answers to the same prompt independent of each other?

A test without a finding says little unless it could have found something; `power` says what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from outstride.core.graph import FloatArray

Numbers = npt.NDArray[np.float64]

ALPHA = 0.01
"""False-positive rate over all three tests together."""
POWER = 0.9
BINS, PAIRS = 16, 4


def rank_position(row: FloatArray, token: int, share: float) -> float:
    """Where a token lies in its distribution: the mass of more likely tokens plus a share of its
    own.

    Returns -1 for a token of probability 0.
    """
    mass = row.astype(np.float64)
    own = mass[token]
    if own <= 0.0:
        return -1.0
    above = mass[(row > row[token])].sum() + mass[:token][row[:token] == row[token]].sum()
    return float(min((above + share * own) / mass.sum(), 1.0 - 1e-12))


# --- the distribution of chi-square ---------------------------------------------------------------


def _tail(freedom: float | Numbers, statistic: float) -> Numbers:
    half = torch.as_tensor(np.asarray(freedom, dtype=np.float64) / 2)
    found = torch.special.gammaincc(half, torch.full_like(half, statistic / 2))
    return np.asarray(found.numpy())


def _solve(rises: Any, bound: float, high: float) -> float:
    """Where a rising function reaches a bound, by bisection."""
    low = 0.0
    while rises(high) < bound:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rises(middle) < bound else (low, middle)
    return high


def power(freedom: int, alpha: float, excess: float) -> float:
    """Probability of a significant result if the statistic's mean is larger by `excess` than
    expected.
    """
    bar = _solve(lambda x: 1.0 - float(_tail(freedom, x)), 1.0 - alpha, 4.0 * freedom)
    counts = np.arange(int(excess / 2 + 12 * np.sqrt(excess / 2 + 1) + 20), dtype=np.float64)
    logs = torch.lgamma(torch.as_tensor(counts + 1)).numpy()
    weights = np.exp(counts * np.log(max(excess / 2, 1e-300)) - excess / 2 - logs)
    return float((weights * _tail(freedom + 2 * counts, bar)).sum())


def excess_for(freedom: int, alpha: float, wanted_power: float = POWER) -> float:
    """The excess of the statistic's mean that is found with the wanted power."""
    return _solve(lambda x: power(freedom, alpha, x), wanted_power, 8.0)


# --- the test -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UniformityTest:
    """One chi-square test."""

    name: str
    count: int
    p: float | None
    """The p-value; None if there are too few values to test."""


@dataclass(slots=True)
class DistributionReport:
    """Results of the tests, and what they would have found."""

    tokens: int
    impossible: int
    """Tokens to which the target gives probability 0."""
    tests: list[UniformityTest] = field(default_factory=list)
    shifted_share: float = 1.0
    """Smallest share of tokens at wrong ranks that is found with probability `POWER`."""
    greedy_share: float = 1.0
    """The same for tokens that are the most likely one instead of sampled."""

    @property
    def significance(self) -> float:
        """The p-value below which a single test is significant (Bonferroni)."""
        return ALPHA / max(sum(test.p is not None for test in self.tests), 1)

    @property
    def holds(self) -> bool:
        return not self.impossible and all(
            test.p is None or test.p >= self.significance for test in self.tests
        )

    @property
    def tested(self) -> bool:
        return any(test.p is not None for test in self.tests)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "holds": self.holds,
            "tested": self.tested,
            "alpha": ALPHA,
            "power": POWER,
        }


def _chi_square(name: str, counts: npt.NDArray[np.int64]) -> UniformityTest:
    total = int(counts.sum())
    if total < 5 * counts.size:  # too few bins are filled for a chi-square test
        return UniformityTest(name, total, None)
    due = total / counts.size
    statistic = float(((counts - due) ** 2).sum() / due)
    return UniformityTest(name, total, float(_tail(counts.size - 1, statistic)))


def _table(pairs: Sequence[Numbers]) -> npt.NDArray[np.int64]:
    both = (np.concatenate([np.zeros((0, 2)), *pairs]) * PAIRS).astype(np.int64)
    return np.bincount(both[:, 0] * PAIRS + both[:, 1], minlength=PAIRS**2)


def run_tests(texts: Sequence[Sequence[Numbers]]) -> DistributionReport:
    """Tests the rank positions of answers: by prompt, then by sample, one number for each token."""
    flat = np.concatenate([np.zeros(0), *(text for samples in texts for text in samples)])
    good = [[text[text >= 0] for text in samples] for samples in texts]
    ranks = np.bincount((flat[flat >= 0] * BINS).astype(np.int64), minlength=BINS)
    neighbours = [
        text[: len(text) // 2 * 2].reshape(-1, 2)  # no number in two pairs
        for samples in good
        for text in samples
    ]
    siblings = [
        np.stack([one[: len(other)], other[: len(one)]], axis=1)
        for samples in good
        for one, other in zip(samples[::2], samples[1::2], strict=False)
    ]
    report = DistributionReport(tokens=len(flat), impossible=int((flat < 0).sum()))
    report.tests = [
        _chi_square("ranks", ranks),
        _chi_square("neighbours", _table(neighbours)),
        _chi_square("samples", _table(siblings)),
    ]
    return report


def estimate_power(report: DistributionReport, tops: Numbers) -> None:
    """Computes what would have been found; `tops` are the probabilities of the most likely tokens."""
    if report.tests[0].p is None:
        return
    excess = excess_for(BINS - 1, report.significance) / report.tests[0].count
    # The least conspicuous way to put a share s at wrong ranks moves s evenly: w**2 = 4 s**2.
    report.shifted_share = min(1.0, float(np.sqrt(excess / 4)))
    edges = np.arange(BINS + 1) / BINS
    taken = np.diff(np.minimum(edges[None, :] / np.maximum(tops[:, None], 1e-9), 1.0), axis=1)
    strength = float(((taken.mean(axis=0) - 1 / BINS) ** 2).sum() * BINS)
    if strength > 0:
        report.greedy_share = min(1.0, float(np.sqrt(excess / strength)))
