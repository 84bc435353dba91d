"""Rejection sampling: rules that accept one of several candidates and keep the target's distribution.

All work on many cases at once, one per row, so that tests and `outstride bench acceptance` run the
rules of the acceptors themselves. p and q are the distributions of target and draft model, shape
(n, vocabulary); `tokens` are the candidates in the order in which they were sampled, shape (n, k);
`draws` are uniform numbers in (0, 1), one for each. A rule returns which candidate was accepted (k
for none) and the residual distribution to sample from if none was.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from outstride.core.graph import IntArray

Rows = npt.NDArray[np.float64]
Picked = tuple[IntArray, Rows]


def _normalized(rows: Rows, otherwise: Rows) -> Rows:
    """Rows that sum to 1; a row without mass is replaced by the one of `otherwise`."""
    mass = rows.sum(axis=1, keepdims=True)
    return np.where(mass > 0, rows / np.where(mass > 0, mass, 1.0), otherwise)


def in_turn(p: Rows, q: Rows, tokens: IntArray, draws: Rows, *, again: bool) -> Picked:
    """The classic rule, candidate after candidate: min(1, p/q), with the residual as the next p.

    again: candidates were sampled independently, so that one may come again; otherwise they were
    sampled without replacement, each from q without those before it.
    """
    count, line = tokens.shape[1], np.arange(len(tokens))
    taken = np.full(len(tokens), count)
    for i in range(count):
        token = tokens[:, i]
        holds = draws[:, i] * q[line, token] < p[line, token]
        taken = np.where(holds & (taken == count), i, taken)
        p = _normalized(np.maximum(p - q, 0.0), p)  # no mass: p and q differ by rounding alone
        if not again:
            q = q.copy()
            q[line, token] = 0.0
            q = _normalized(q, q)
    return taken, p


def threshold(p: Rows, q: Rows, count: int, rounds: int = 30) -> Rows:
    """SpecTr's factor for `count` independent candidates, one per row, between 1 and `count`.

    A candidate is accepted with probability min(1, p / (factor * q)). The best factor is the one at
    which the candidates together accept exactly `factor` times as often as a single one: a smaller
    factor would accept a token more often than the target samples it.
    """
    low, high = np.ones((len(p), 1)), np.full((len(p), 1), float(count))
    for _ in range(rounds if count > 1 else 0):
        middle = (low + high) / 2
        one = np.minimum(q, p / middle).sum(axis=1, keepdims=True)
        fits = 1.0 - (1.0 - one) ** count <= middle * one
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    return high


def k_seq(p: Rows, q: Rows, tokens: IntArray, draws: Rows) -> Picked:
    """SpecTr's k-sequential selection among independent candidates: one threshold for all."""
    count = tokens.shape[1]
    factor = threshold(p, q, count)
    at_p, at_q = np.take_along_axis(p, tokens, axis=1), np.take_along_axis(q, tokens, axis=1)
    holds = draws * factor * at_q < at_p
    taken = np.where(holds.any(axis=1), holds.argmax(axis=1), count)
    share = np.minimum(q, p / factor)
    one = share.sum(axis=1, keepdims=True)
    all_of_them = 1.0 - (1.0 - one) ** count
    rest = np.maximum(p - share * all_of_them / np.where(one > 0, one, 1.0), 0.0)
    return taken, _normalized(rest, p)


def block(p: Rows, q: Rows, tokens: IntArray, draws: Rows) -> Picked:
    """Block verification: how many tokens of a chain are accepted, and the residual for the next one.

    Here p is (n, k + 1, vocabulary) and q (n, k, vocabulary), along the chain. `share` is the product
    of p/q so far, capped at 1 after every token, so that a token with a high ratio makes up for a
    later one with a low ratio.
    """
    cases, count = tokens.shape
    line, share, length = np.arange(cases), np.ones(cases), np.zeros(cases, dtype=np.int64)
    rest = np.zeros_like(p[:, 0])
    for i in range(count + 1):
        if i > 0:
            token = tokens[:, i - 1]
            share = np.minimum(share * p[line, i - 1, token] / q[line, i - 1, token], 1.0)
        if i < count:
            left = np.maximum(share[:, None] * p[:, i] - q[:, i], 0.0)
            mass = left.sum(axis=1)
            over = mass + 1.0 - share
            rate = np.where(over > 0, mass / np.where(over > 0, over, 1.0), 1.0)
        else:
            left, rate = p[:, i], share
        holds = draws[:, i - 1] < rate if i > 0 else np.ones(cases, dtype=np.bool_)
        length = np.where(holds, i, length)
        rest = np.where(holds[:, None], left, rest)
    return length, _normalized(rest, p[line, length])
