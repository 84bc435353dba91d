"""Rules that pick one of several candidates and keep the target's distribution.

All work on many cases at once, one per row, so that tests and `outstride bench acceptance` run the
very rules that acceptors follow. p and q are the distributions of target and draft model, shape
(n, vocabulary); `tokens` are the candidates in the order in which they were drawn, shape (n, k);
`draws` are uniform numbers in (0, 1), one for each. A rule returns which candidate was taken (k for
none) and what to draw from if none was, up to a factor.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from outstride.core.graph import IntArray

Rows = npt.NDArray[np.float64]
Picked = tuple[IntArray, Rows]


def _normal(rows: Rows, otherwise: Rows) -> Rows:
    """Rows that sum to 1; one without any mass is replaced."""
    mass = rows.sum(axis=1, keepdims=True)
    return np.where(mass > 0, rows / np.where(mass > 0, mass, 1.0), otherwise)


def in_turn(p: Rows, q: Rows, tokens: IntArray, draws: Rows, *, again: bool) -> Picked:
    """The classic rule, candidate after candidate: min(1, p/q), and what q leaves of p for the next.

    again: candidates were drawn independently, so that one may come again; otherwise each was drawn
    from what the ones before it had left of q.
    """
    count, line = tokens.shape[1], np.arange(len(tokens))
    taken = np.full(len(tokens), count)
    for i in range(count):
        token = tokens[:, i]
        holds = draws[:, i] * q[line, token] < p[line, token]
        taken = np.where(holds & (taken == count), i, taken)
        p = _normal(np.maximum(p - q, 0.0), p)  # no mass: they differ by rounding alone
        if not again:
            q = q.copy()
            q[line, token] = 0.0
            q = _normal(q, q)
    return taken, p


def threshold(p: Rows, q: Rows, count: int, rounds: int = 30) -> Rows:
    """SpecTr's factor for `count` independent candidates, one per row, between 1 and `count`.

    A candidate is taken with chance min(1, p / (factor * q)). The best factor is the one at which
    the candidates together take exactly `factor` times what a single one takes: smaller ones take
    more of a token than the target gives it.
    """
    low, high = np.ones((len(p), 1)), np.full((len(p), 1), float(count))
    for _ in range(rounds if count > 1 else 0):
        middle = (low + high) / 2
        one = np.minimum(q, p / middle).sum(axis=1, keepdims=True)
        fits = 1.0 - (1.0 - one) ** count <= middle * one
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    return high


def k_seq(p: Rows, q: Rows, tokens: IntArray, draws: Rows) -> Picked:
    """SpecTr's selection among independent candidates: one threshold for all of them."""
    count = tokens.shape[1]
    factor = threshold(p, q, count)
    at_p, at_q = np.take_along_axis(p, tokens, axis=1), np.take_along_axis(q, tokens, axis=1)
    holds = draws * factor * at_q < at_p
    taken = np.where(holds.any(axis=1), holds.argmax(axis=1), count)
    share = np.minimum(q, p / factor)
    one = share.sum(axis=1, keepdims=True)
    all_of_them = 1.0 - (1.0 - one) ** count
    rest = np.maximum(p - share * all_of_them / np.where(one > 0, one, 1.0), 0.0)
    return taken, _normal(rest, p)


def block(p: Rows, q: Rows, tokens: IntArray, draws: Rows) -> Picked:
    """How many tokens of a chain hold, judged together, and what to draw the next one from.

    Here p is (n, k + 1, vocabulary) and q (n, k, vocabulary), along the chain. `share` is how much
    of the chain so far the target would have written, capped at every token, so that a token that
    it likes better makes up for a later one that it likes less.
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
            chance = np.where(over > 0, mass / np.where(over > 0, over, 1.0), 1.0)
        else:
            left, chance = p[:, i], share
        holds = draws[:, i - 1] < chance if i > 0 else np.ones(cases, dtype=np.bool_)
        length = np.where(holds, i, length)
        rest = np.where(holds[:, None], left, rest)
    return length, _normal(rest, p[line, length])
