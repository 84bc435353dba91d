"""The way to the end: how an answer that has begun can be finished in few tokens.

A bound on tokens would otherwise cut an answer in the middle of its shape, and a cut JSON text is no
JSON text. So a short way to the end is looked for: what is forced is taken, an end is taken where there
may be one, and otherwise the token that closes most. It need not be the shortest way; that it is one is
what counts. While it fits with room to spare, the model chooses freely; when room gets scarce, the way
is followed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from llguidance import LLMatcher

LONGEST = 400
"""Tokens after which the search gives up."""
SPARE = 16
"""Room that is kept in any case: one token may open something that needs several to close."""
FIRST = 48
"""Tokens that are tried one by one: a mask of all costs a hundred times as much."""
_CLOSING = b'"}]'


class Closing:
    """Finds ways to the end, for one vocabulary."""

    def __init__(self, tokens: Sequence[bytes], ends: Collection[int]) -> None:
        self._ends = frozenset(ends)
        rank = np.full(len(tokens), 255, dtype=np.uint8)
        for token, text in enumerate(tokens):
            rank[token] = _rank(text)
        for end in ends:
            rank[end] = 0
        self._rank = rank
        self._first = np.argsort(rank, kind="stable")[:FIRST].tolist()

    def tail(self, matcher: LLMatcher) -> int:
        """How long before a bound one has to begin to watch, for this shape."""
        way = self.way(matcher, LONGEST)
        return 0 if way is None else 3 * len(way) + 2 * SPARE

    def next(self, matcher: LLMatcher, left: int) -> int | None:
        """The token that must follow now for an end within `left` tokens; None: there is a choice."""
        way = self.way(matcher, LONGEST)
        if not way or left > len(way) + SPARE:
            return None
        return way[0]

    def way(self, matcher: LLMatcher, most: int) -> list[int] | None:
        """Tokens to the end, its mark included, or None if none was found."""
        matcher, way = matcher.deep_copy(), list[int]()
        while len(way) < most:
            if matcher.is_stopped() or matcher.is_accepting():
                return [*way, min(self._ends)]
            step = matcher.compute_ff_tokens() or [self._best(matcher)]
            if step[0] < 0 or matcher.try_consume_tokens(step) != len(step):
                return None
            way += step
        return None

    def _best(self, matcher: LLMatcher) -> int:
        """The token that closes most; the likely ones are tried before all are looked at."""
        for token in self._first:
            if matcher.validate_tokens([token]) == 1:
                return int(token)
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: len(self._rank)])
        if not len(allowed):
            return -1
        return int(allowed[np.argmin(self._rank[allowed])])


def _rank(text: bytes) -> int:
    """How well a token closes: ends of strings, objects and arrays, then short plain values."""
    if not text:
        return 250
    if text[:1] in (b'"', b"}", b"]"):
        if all(byte in _CLOSING for byte in text):
            return 10 - min(len(text), 4)  # more at once is better
        return 60 + min(len(text), 30)
    if text.isdigit():
        return 20 + min(len(text), 20)
    if text in (b"true", b"false", b"null"):
        return 40
    if text in (b",", b'",', b'","', b'":'):
        return 100
    if text in (b"[", b"{"):
        return 120
    return 130 + min(len(text), 60)
