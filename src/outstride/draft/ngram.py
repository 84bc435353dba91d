"""`ngram`: prompt lookup, copies of what followed the last few tokens earlier in the text."""

from __future__ import annotations

import numpy as np

from outstride.core.contracts import Demand, Drafter, DraftRounds
from outstride.core.draft_tree import AcceptanceKey, DraftTree
from outstride.core.graph import IntArray
from outstride.core.sequence import View
from outstride.registry import method

AGREED = 3
"""How many tokens in a row must be copied before the output counts as following the prompt."""
ASTRAY = 3
"""How many tokens of its own the output may have inserted since."""


@method("ngram", family="retrieval")
class NGram(Drafter):
    """Copies what followed the latest earlier occurrence of the last few tokens.

    The longest matching ending wins; a copy that reaches the end of the text goes on with itself,
    so that repetitions are drafted to full length. With `guided`, for tasks that rewrite their input,
    the prompt is searched first, and an output that followed it and then wrote something else is
    expected to return: after the place where it left, with the tokens there replaced or kept.

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
        return Demand(max_nodes=min(self.length, view.limit - view.end - 1), gain=1.0)

    def draft_tree(self, view: View, budget: int) -> DraftRounds:
        yield from ()
        found, limit = DraftTree(), min(budget, self.length)
        if self.guided:
            self._copy(found, view.tokens, view.prompt_length, limit)
        if not len(found):
            draft, size = self.lookup(view.tokens, limit)
            for i, token in enumerate(draft):
                known = min(size + i, 8)
                found.add(token, i - 1, AcceptanceKey("ngram", (known,)), 0.3 + 0.05 * known)
        return found

    def lookup(self, tokens: list[int], limit: int) -> tuple[list[int], int]:
        """The continuation of the latest earlier match, `limit` tokens of it, and the match's size."""
        text = np.asarray(tokens, dtype=np.int64)
        found, matched = _latest(text[:-1], text, self.longest)
        if matched < self.shortest:
            return [], 0
        period = len(text) - 1 - found
        return [int(text[found + 1 + i % period]) for i in range(limit)], matched

    def _copy(self, draft: DraftTree, tokens: list[int], start: int, limit: int) -> None:
        """Drafts more of the prompt (all before `start`) if the output has been following it."""
        prompt = np.asarray(tokens[:start], dtype=np.int64)
        output = np.asarray(tokens[start:], dtype=np.int64)
        for astray in range(min(ASTRAY, len(output) - AGREED) + 1):
            place, agreed = _latest(
                prompt, output[: len(output) - astray], max(self.longest, AGREED)
            )
            if agreed < AGREED:
                continue
            rest = tokens[place + 1 : start]
            if astray == 0:
                ways = [rest]
            elif tokens[-1] in rest[: 2 * ASTRAY]:  # back in the prompt, some tokens left out
                ways = [rest[rest.index(tokens[-1]) + 1 :]]
            else:
                ways = [rest[astray:], rest]
                if rest[astray : astray + 1] == rest[:1]:
                    ways.pop()
            for way in ways:
                key = AcceptanceKey("ngram", (min(agreed, 8), astray, len(ways)))
                draft.add_run(way[: limit // len(ways)], key, 0.7 / len(ways))
            return


def _latest(text: IntArray, ending: IntArray, longest: int) -> tuple[int, int]:
    """The last place of the longest match of an ending in a text (its last token), and its size."""
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
