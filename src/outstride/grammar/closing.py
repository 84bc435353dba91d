"""Finishes structured output before `max_tokens` cuts it.

A bound on tokens would otherwise cut an answer in the middle, and cut JSON is not valid JSON. So the
matcher searches a short completion: it takes forced tokens, ends where the grammar allows an end, and
otherwise takes the token that closes most brackets. The completion need not be the shortest one. While
it fits easily, the model chooses freely; near the bound, its tokens are the only ones allowed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from llguidance import LLMatcher

MAX_COMPLETION = 400
"""Tokens after which the search gives up."""
SPARE = 16
"""Extra tokens that are kept free: one token may open something that needs several to close."""
CLOSING_TOKENS = 48
"""Tokens that are tried one by one: a mask over the vocabulary costs a hundred times as much."""
_CLOSING = b'"}]'


class CompletionSearch:
    """Finds short completions of structured output, for one vocabulary."""

    def __init__(self, tokens: Sequence[bytes], ends: Collection[int]) -> None:
        self._ends = frozenset(ends)
        rank = np.full(len(tokens), 255, dtype=np.uint8)
        for token, text in enumerate(tokens):
            rank[token] = _rank(text)
        for end in ends:
            rank[end] = 0
        self._rank = rank
        self._first = np.argsort(rank, kind="stable")[:CLOSING_TOKENS].tolist()

    def margin(self, matcher: LLMatcher) -> int:
        """How many tokens before the bound the search must begin, for this grammar."""
        found = self.completion(matcher, MAX_COMPLETION)
        return 0 if found is None else 3 * len(found) + 2 * SPARE

    def next(self, matcher: LLMatcher, left: int) -> int | None:
        """The token that must follow now to end within `left` tokens; None: the model may choose."""
        found = self.completion(matcher, MAX_COMPLETION)
        if not found or left > len(found) + SPARE:
            return None
        return found[0]

    def completion(self, matcher: LLMatcher, max_tokens: int) -> list[int] | None:
        """Tokens to the end, the end token included, or None if none was found."""
        matcher, found = matcher.deep_copy(), list[int]()
        while len(found) < max_tokens:
            if matcher.is_stopped() or matcher.is_accepting():
                return [*found, min(self._ends)]
            step = matcher.compute_ff_tokens() or [self._best(matcher)]
            if step[0] < 0 or matcher.try_consume_tokens(step) != len(step):
                return None
            found += step
        return None

    def _best(self, matcher: LLMatcher) -> int:
        """The allowed token that closes most; likely ones are tried before the whole vocabulary."""
        for token in self._first:
            if matcher.validate_tokens([token]) == 1:
                return int(token)
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: len(self._rank)])
        if not len(allowed):
            return -1
        return int(allowed[np.argmin(self._rank[allowed])])


def _rank(text: bytes) -> int:
    """The rank of a token for closing: ends of strings, objects and arrays, then short values."""
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
