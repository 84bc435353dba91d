"""Prompt lookup: what followed the same words before may follow them again."""

from __future__ import annotations

import numpy as np

from outstride.core.contracts import Demand, Drafter, Guessing
from outstride.core.graph import IntArray
from outstride.core.guess import Guess, Sign
from outstride.core.sequence import View
from outstride.registry import method

AGREED = 3
"""So many tokens in a row must have been copied for the output to count as following the prompt."""
ASTRAY = 3
"""So many tokens of its own the output may have put in since."""


@method("ngram", family="retrieval")
class NGram(Drafter):
    """Copies what followed the latest earlier occurrence of the last few tokens.

    The longest matching ending wins; a copy that reaches the end of the text goes on with itself,
    so that repetitions are drafted to full length. With `guided`, for tasks that rewrite their input,
    the prompt is searched first, and an output that followed it and then wrote something else is
    expected to return: behind the place where it left, with the words there replaced or kept.

    Paper: Prompt Lookup Decoding (Saxena, 2023); LLMA, Inference with Reference (Yang et al., 2023);
      input-guided: Aggressive Decoding (Ge et al., 2022)
    Exactness: exact
    Needs: nothing
    Cost per step: up to `length` further nodes; the search is one scan over the text
    """

    def __init__(
        self, *, length: int = 8, longest: int = 4, shortest: int = 1, guided: bool = False
    ) -> None:
        if length < 1 or not 1 <= shortest <= longest:
            raise ValueError("needs length >= 1 and 1 <= shortest <= longest")
        self.length = length
        self.longest = longest
        self.shortest = shortest
        self.guided = guided

    def demand(self, view: View) -> Demand:
        return Demand(most=min(self.length, view.limit - view.end - 1), gain=1.0)

    def guess(self, view: View, room: int) -> Guessing:
        yield from ()
        guess, most = Guess(), min(room, self.length)
        if self.guided:
            self._copy(guess, view.tokens, view.prompt_length, most)
        if not len(guess):
            draft, size = self.lookup(view.tokens, most)
            for i, token in enumerate(draft):
                known = min(size + i, 8)
                guess.add(token, i - 1, Sign("ngram", (known,)), 0.3 + 0.05 * known)
        return guess

    def lookup(self, tokens: list[int], most: int) -> tuple[list[int], int]:
        """The continuation of the latest earlier match, `most` tokens of it, and the match's size."""
        text = np.asarray(tokens, dtype=np.int64)
        found, matched = _latest(text[:-1], text, self.longest)
        if matched < self.shortest:
            return [], 0
        period = len(text) - 1 - found
        return [int(text[found + 1 + i % period]) for i in range(most)], matched

    def _copy(self, guess: Guess, tokens: list[int], start: int, most: int) -> None:
        """Goes on copying the prompt (all before `start`) if the output has been following it."""
        prompt = np.asarray(tokens[:start], dtype=np.int64)
        output = np.asarray(tokens[start:], dtype=np.int64)
        for astray in range(min(ASTRAY, len(output) - AGREED) + 1):
            place, agreed = _latest(
                prompt, output[: len(output) - astray], max(self.longest, AGREED)
            )
            if agreed < AGREED:
                continue
            behind = tokens[place + 1 : start]
            if astray == 0:
                ways = [behind]
            elif tokens[-1] in behind[: 2 * ASTRAY]:  # back in the prompt, some words left out
                ways = [behind[behind.index(tokens[-1]) + 1 :]]
            else:
                ways = [behind[astray:], behind]
                if behind[astray : astray + 1] == behind[:1]:
                    ways.pop()
            for way in ways:
                sign = Sign("ngram", (min(agreed, 8), astray, len(ways)))
                guess.add_run(way[: most // len(ways)], sign, 0.7 / len(ways))
            return


def _latest(text: IntArray, ending: IntArray, longest: int) -> tuple[int, int]:
    """Where the longest match of an ending stands last in a text (its last token), and its size."""
    found, matched = -1, 0
    if not len(ending):
        return found, matched
    ends = np.flatnonzero(text == ending[-1])
    for size in range(1, min(longest, len(ending)) + 1):
        if size > 1:
            ends = ends[ends >= size - 1]
            ends = ends[text[ends - size + 1] == ending[-size]]
        if not len(ends):
            break
        found, matched = int(ends[-1]), size
    return found, matched
