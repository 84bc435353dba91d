"""Consensus: samples of one prompt that run together say much of the same."""

from __future__ import annotations

from dataclasses import dataclass, field

from outstride.core.contracts import Demand, Drafter, Guessing
from outstride.core.guess import Guess, Sign
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sequence import View
from outstride.registry import method

LATEST = 32
"""How many places with the same ending are looked at."""


@dataclass(slots=True)
class _Heard:
    """What the siblings have said: where each ending of two tokens stands, by sibling and position."""

    read: dict[int, int] = field(default_factory=dict)
    places: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)


@dataclass(slots=True)
class _Vote:
    """A token that siblings said here: the weight of those who did, and what they said next."""

    weight: float = 0.0
    voices: set[int] = field(default_factory=set)
    next: dict[int, _Vote] = field(default_factory=dict)


@method("consensus", family="retrieval")
class Consensus(Drafter):
    """Drafts what the other samples of the same request said behind the same words.

    Every sibling whose answer contains the last two tokens votes for what followed there, with more
    weight the further back it agrees; votes are pooled into a tree, and where most agree it goes
    deep. Alone, a request drafts nothing.

    Paper: Speculative Decoding for Multi-Sample Inference (Li et al., 2025)
    Exactness: exact
    Needs: nothing
    Cost per step: up to `size` further nodes; an index of the siblings' answers
    """

    def __init__(self, *, size: int = 12, length: int = 8) -> None:
        if size < 1 or length < 1:
            raise ValueError("needs size >= 1 and length >= 1")
        self.size = size
        self.length = length

    def demand(self, view: View) -> Demand:
        if next(view.siblings, None) is None or view.limit - view.end <= 1:
            return Demand()
        return Demand(most=self.size, gain=1.0)

    def guess(self, view: View, room: int) -> Guessing:
        yield from ()
        heard: _Heard | None = view.state
        if heard is None or view.end < 2:
            return Guess()
        votes, matched = self._votes(view, heard, min(self.length, view.limit - view.end - 1))
        return _elect(votes, matched, min(room, self.size))

    def _votes(self, view: View, heard: _Heard, length: int) -> tuple[_Vote, int]:
        """What followed the last two tokens elsewhere, and the longest agreement before them."""
        tokens, root, longest = view.tokens, _Vote(), 0
        texts = {sibling.index: sibling.tokens for sibling in view.siblings}
        for index, place in heard.places.get((tokens[-2], tokens[-1]), ())[-LATEST:]:
            text, matched = texts[index], 2
            while matched < 8 and matched <= place and matched < len(tokens):
                if text[place - matched] != tokens[-1 - matched]:
                    break
                matched += 1
            longest = max(longest, matched)
            node, weight = root, float(matched * matched)
            node.weight += weight
            for token in text[place + 1 : place + 1 + length]:
                node = node.next.setdefault(token, _Vote())
                node.weight += weight
                node.voices.add(index)
        return root, longest

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> _Heard:
        heard: _Heard = view.state or _Heard()
        for sibling in view.siblings:
            text, index = sibling.tokens, sibling.index
            start = heard.read.get(index, max(view.prompt_length - 1, 1))
            for place in range(start, len(text)):
                heard.places.setdefault((text[place - 1], text[place]), []).append((index, place))
            heard.read[index] = max(start, len(text))
        return heard


def _elect(root: _Vote, matched: int, room: int) -> Guess:
    """The tokens with the most votes; a child never has more of them than its parent."""
    guess = Guess()
    waiting = [(vote.weight, -1, token, vote, root.weight, 0) for token, vote in root.next.items()]
    while waiting and len(guess) < room:
        best = max(range(len(waiting)), key=lambda i: waiting[i][0])
        weight, parent, token, vote, rivals, depth = waiting.pop(best)
        share, voices = weight / rivals, min(len(vote.voices), 3)
        known = min((matched + depth) // 2, 4)
        sign = Sign("consensus", (known, voices, int(share * 2.99)))
        parent = guess.add(token, parent, sign, share * (0.4 + 0.1 * known))
        waiting += [
            (below.weight, parent, said, below, weight, depth + 1)
            for said, below in vote.next.items()
        ]
    return guess
