"""Acceptance rates: the best that any rule can reach with a draft distribution, and what each rule
reaches.

A rule that keeps the target's distribution p accepts one of k candidates or none. The largest
possible acceptance rate is a maximum flow from candidates to tokens, at most p of each. By max-flow
min-cut it is

    1 + min over sets H of tokens of  p(H) - Q(H),      Q(H): probability that all candidates lie in H.

For candidates of one distribution q, sampled with or without replacement, the best H holds the
tokens with the largest q/p (Hu et al., Towards Optimal Multi-draft Speculative Decoding, 2025), so
only one set per token has to be tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from outstride.accept.rejection_sampling import Rows, in_turn, threshold
from outstride.errors import InvalidParams

Row = npt.NDArray[np.float64]
Progress = Callable[[int, int], None]

RULES = (
    "optimum without replacement",
    "recursive (rsd)",
    "optimum independent",
    "k-seq (spectr)",
    "in turn (mcsd)",
    "single rejection",
    "shared noise (draft)",
)
"""Order of the table: each optimum, then the rules that it bounds."""


# --- the optimum ----------------------------------------------------------------------------------


def inside(q: Row, order: npt.NDArray[np.int64], count: int, *, again: bool) -> Row:
    """Probability that all candidates lie among the first i tokens of an order, for i from 0 on.

    Without replacement, tokens arrive at exponential times with rates q. All candidates lie inside
    if `count` tokens of the set arrive before the first token outside it. The integral over that
    time is taken on a grid of its logarithm, where the integrand is smooth and vanishes at both
    ends.
    """
    mass = np.concatenate([[0.0], np.cumsum(q[order])])
    if again or count == 1:
        return np.asarray(np.minimum(mass, 1.0) ** count)
    logs = np.linspace(-30.0, 40.0, 1401)
    times, step = np.exp(logs), logs[1] - logs[0]
    arrived = np.zeros((count, len(times)))  # that exactly j have, of those seen so far
    arrived[0] = 1.0
    result = np.zeros(len(order) + 1)
    left = np.concatenate([np.cumsum(q[order][::-1])[::-1], [0.0]])
    for i, token in enumerate(order):
        here = -np.expm1(-q[token] * times)
        arrived[1:] = arrived[1:] * (1.0 - here) + arrived[:-1] * here
        arrived[0] *= 1.0 - here
        outside = left[i + 1]
        if outside <= 0.0:
            result[i + 1 :] = 1.0
            break
        enough = 1.0 - arrived.sum(axis=0)
        result[i + 1] = (enough * outside * np.exp(-outside * times) * times).sum() * step
    return result


def optimum(p: Row, q: Row, count: int, *, again: bool) -> float:
    """Largest acceptance rate of a rule that keeps p, with `count` candidates sampled from q."""
    count = count if again else min(count, int((q > 0).sum()))
    with np.errstate(divide="ignore", invalid="ignore"):
        order = np.argsort(-np.where(q > 0, q / p, 0.0), kind="stable")
    taken = np.concatenate([[0.0], np.cumsum(p[order])])
    return float(1.0 + (taken - inside(q, order, count, again=again)).min())


# --- what rules reach -----------------------------------------------------------------------------


def single(p: Row, q: Row) -> float:
    """Rejection sampling with one candidate."""
    return float(np.minimum(p, q).sum())


def one_by_one(p: Row, q: Row, count: int) -> float:
    """Rejection sampling over independent candidates in turn (MCSD).

    After a rejection the residual does not depend on which candidate was rejected.
    """
    refused = 1.0
    for _ in range(count):
        refused *= 1.0 - single(p, q)
        rest = np.maximum(p - q, 0.0)
        if not rest.any():
            return 1.0
        p = rest / rest.sum()
    return 1.0 - refused


def selected(p: Row, q: Row, count: int) -> float:
    """The K-SEQ rule of SpecTr."""
    factor = threshold(p[None], q[None], count)
    return float(1.0 - (1.0 - np.minimum(q, p / factor[0]).sum()) ** count)


def recursive(p: Row, q: Row, count: int, trials: int, rng: np.random.Generator) -> float:
    """Rejection sampling over candidates without replacement, in turn (RSD); a Monte Carlo estimate."""
    count = min(count, int((q > 0).sum()))
    many_p, many_q = np.broadcast_to(p, (trials, len(p))), np.broadcast_to(q, (trials, len(q)))
    tokens = _leaders(q, rng.gumbel(size=(trials, len(q))), count)
    taken, _ = in_turn(many_p, many_q, tokens, rng.random((trials, count)), again=False)
    return float((taken < count).mean())


def shared(p: Row, q: Row, count: int, trials: int, rng: np.random.Generator) -> float:
    """Exact match under shared Gumbel noise: the target's token is among the draft model's top-k; an
    estimate.
    """
    noise = rng.gumbel(size=(trials, len(p)))
    return float((_leaders(q, noise, count) == _leaders(p, noise, 1)).any(axis=1).mean())


def _leaders(row: Row, noise: Rows, count: int) -> npt.NDArray[np.int64]:
    """Tokens with the largest sums of log-probability and noise, best first."""
    with np.errstate(divide="ignore"):
        return np.argsort(-(np.log(row) + noise), axis=1)[:, :count]


# --- the measurement ------------------------------------------------------------------------------


@dataclass(slots=True)
class AcceptanceCase:
    """Mean rates over several pairs of distributions."""

    noise: float
    """Standard deviation of the noise that makes the draft model's logits from the target's."""
    candidates: int
    overlap: float
    rates: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        rates = {name: round(rate, 5) for name, rate in self.rates.items()}
        return {
            "noise": self.noise,
            "overlap": round(self.overlap, 5),
            "candidates": self.candidates,
            "rates": rates,
        }


@dataclass(slots=True)
class AcceptanceReport:
    """All cases."""

    cases: list[AcceptanceCase] = field(default_factory=list)

    def samples(self) -> list[dict[str, Any]]:
        return [case.to_dict() for case in self.cases]

    def summary(self) -> dict[str, Any]:
        """The largest distance of each rule from the optimum with the same kind of candidates."""
        bounds = {
            "recursive (rsd)": "optimum without replacement",
            "k-seq (spectr)": "optimum independent",
            "in turn (mcsd)": "optimum independent",
        }
        short = {
            rule: max((case.rates[bound] - case.rates[rule] for case in self.cases), default=0.0)
            for rule, bound in bounds.items()
        }
        return {
            "falls short by at most": {
                rule: round(shortfall, 4) for rule, shortfall in short.items()
            }
        }


def distributions(
    size: int, spread: float, noise: float, rng: np.random.Generator
) -> tuple[Row, Row]:
    """A target and a draft distribution: normal logits, and the same logits with noise."""
    logits = spread * rng.standard_normal(size)
    both = []
    for x in (logits, logits + noise * rng.standard_normal(size)):
        weights = np.exp(x - x.max())
        both.append(weights / weights.sum())
    return both[0], both[1]


def measure(
    noises: Sequence[float],
    candidates: Sequence[int],
    *,
    size: int = 256,
    spread: float = 3.0,
    pairs: int = 8,
    trials: int = 2000,
    seed: int = 0,
    progress: Progress | None = None,
) -> AcceptanceReport:
    """Measures every rule for every noise level and number of candidates."""
    if min([*candidates, pairs, trials], default=0) < 1 or not noises or size < max(candidates):
        raise InvalidParams(
            "needs noises, candidates, pairs and trials of 1 or more, and a vocabulary of at least "
            "as many tokens as candidates"
        )
    report, done = AcceptanceReport(), 0
    for noise in noises:
        rng = np.random.default_rng(seed)
        drawn = [distributions(size, spread, noise, rng) for _ in range(pairs)]
        for count in candidates:
            rates = dict.fromkeys(RULES, 0.0)
            for p, q in drawn:
                for name, rate in zip(RULES, _rates(p, q, count, trials, rng), strict=True):
                    rates[name] += rate / pairs
                done += 1
                if progress is not None:
                    progress(done, len(noises) * len(candidates) * pairs)
            overlap = sum(single(p, q) for p, q in drawn) / pairs
            report.cases.append(AcceptanceCase(noise, count, overlap, rates))
    return report


def _rates(p: Row, q: Row, count: int, trials: int, rng: np.random.Generator) -> tuple[float, ...]:
    return (
        optimum(p, q, count, again=False),
        recursive(p, q, count, trials, rng),
        optimum(p, q, count, again=True),
        selected(p, q, count),
        one_by_one(p, q, count),
        single(p, q),
        shared(p, q, count, trials, rng),
    )
