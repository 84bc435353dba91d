"""Prompt lookup: what followed the same words before may follow them again."""

from __future__ import annotations

import numpy as np

from outstride.core.contracts import Demand, Drafter, Guessing
from outstride.core.guess import Guess, Sign
from outstride.core.sequence import View
from outstride.registry import method


@method("ngram", family="retrieval")
class NGram(Drafter):
    """Copies what followed the latest earlier occurrence of the last few tokens.

    The longest matching ending wins; a copy that reaches the end of the text goes on with itself,
    so that repetitions are drafted to full length.

    Paper: Prompt Lookup Decoding (Saxena, 2023); LLMA, Inference with Reference (Yang et al., 2023)
    Exactness: exact
    Needs: nothing
    Cost per step: up to `length` further nodes; the search is one scan over the text
    """

    def __init__(self, *, length: int = 8, longest: int = 4, shortest: int = 1) -> None:
        if length < 1 or not 1 <= shortest <= longest:
            raise ValueError("needs length >= 1 and 1 <= shortest <= longest")
        self.length = length
        self.longest = longest
        self.shortest = shortest

    def demand(self, view: View) -> Demand:
        return Demand(most=min(self.length, view.limit - view.end - 1), gain=1.0)

    def guess(self, view: View, room: int) -> Guessing:
        yield from ()
        draft, size = self.lookup(view.tokens, min(room, self.length))
        guess = Guess()
        for i, token in enumerate(draft):
            known = min(size + i, 8)
            guess.add(token, i - 1, Sign("ngram", (known,)), 0.3 + 0.05 * known)
        return guess

    def lookup(self, tokens: list[int], most: int) -> tuple[list[int], int]:
        """The continuation of the latest earlier match, `most` tokens of it, and the match's size."""
        text = np.asarray(tokens, dtype=np.int64)
        ends = np.flatnonzero(text[:-1] == text[-1])  # where a match may end
        found, matched = -1, 0
        for size in range(1, min(self.longest, len(text) - 1) + 1):
            if size > 1:
                ends = ends[ends >= size - 1]
                ends = ends[text[ends - size + 1] == text[-size]]
            if not len(ends):
                break
            if size >= self.shortest:
                found, matched = int(ends[-1]), size
        if found < 0:
            return [], 0
        period = len(text) - 1 - found
        return [int(text[found + 1 + i % period]) for i in range(most)], matched
