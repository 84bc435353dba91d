"""Suffix matching: the longest known ending of the text says what followed it, and how often."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import islice

from outstride.core.contracts import Demand, Drafter, Guessing
from outstride.core.guess import Guess, PerTenant, Sign
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sequence import View
from outstride.registry import method

TRUST = (0.0, 0.4, 0.55, 0.65, 0.72, 0.76, 0.8, 0.83, 0.86, 0.9)
"""First word on the chance of what always followed an ending of so many tokens."""
TAIL = 8
"""How much of a prompt is remembered with its answer: enough to know how answers begin."""


class Automaton:
    """Every run of tokens in the texts it has read, and how often each was seen.

    A suffix automaton: a place stands for runs that always occurred together, `length` is that of the
    longest one, and `link` leads to the next shorter ending. Reading takes constant time per token.
    """

    __slots__ = ("after", "count", "length", "link", "size")
    DEEPEST = 32
    """Counts are kept for so many endings of a text, the longest ones."""

    def __init__(self) -> None:
        self.after: list[dict[int, int]] = [{}]
        self.length = [0]
        self.link = [-1]
        self.count = [0]
        self.size = 0

    def read(self, at: int, token: int) -> int:
        """The place of a text that stood at `at`, with one more token."""
        after, length, link, count = self.after, self.length, self.link, self.count
        self.size += 1
        known = after[at].get(token)
        if known is None:
            place, above = len(after), at
            after.append({})
            length.append(length[at] + 1)
            link.append(0)
            count.append(0)
            while above >= 0 and token not in after[above]:
                after[above][token] = place
                above = link[above]
            if above >= 0:
                link[place] = self._exact(above, token)
        else:
            place = self._exact(at, token)
        ending = place
        for _ in range(self.DEEPEST):
            if ending <= 0:
                break
            count[ending] += 1
            ending = link[ending]
        return place

    def _exact(self, at: int, token: int) -> int:
        """The place whose longest run is that of `at` and the token: split off if need be."""
        after, length, link = self.after, self.length, self.link
        place = after[at][token]
        if length[place] == length[at] + 1:
            return place
        split = len(after)
        after.append(after[place].copy())
        length.append(length[at] + 1)
        link.append(link[place])
        self.count.append(self.count[place])
        link[place] = split
        while at >= 0 and after[at].get(token) == place:
            after[at][token] = split
            at = link[at]
        return split

    def follow(self, at: int, matched: int, token: int) -> tuple[int, int]:
        """The longest known ending after one more token, and its length; nothing is added."""
        while at > 0 and token not in self.after[at]:
            at = self.link[at]
            matched = self.length[at]
        found = self.after[at].get(token)
        return (0, 0) if found is None else (found, matched + 1)

    def continued(self, at: int, matched: int) -> tuple[int, int]:
        """The longest ending that something followed."""
        while at > 0 and not self.after[at]:
            at = self.link[at]
            matched = self.length[at]
        return at, matched

    def followers(self, at: int, most: int) -> list[tuple[int, int, float]]:
        """Tokens that followed here, most frequent first: token, place, share."""
        after, count = self.after[at], self.count
        if len(after) == 1:
            [(token, place)] = after.items()
            return [(token, place, 1.0)]
        latest = list(islice(reversed(after.items()), 32))  # the latest kinds win ties
        total = 0
        for _, place in latest:
            total += count[place]
        latest.sort(key=lambda item: -count[item[1]])
        return [(token, place, count[place] / total) for token, place in latest[:most]]


@dataclass(slots=True)
class _Memory:
    """What a tenant's earlier answers said: the young half takes in, the old half is on its way out."""

    young: Automaton = field(default_factory=Automaton)
    old: Automaton = field(default_factory=Automaton)

    def age(self, most: int) -> None:
        """Drops the old half once the young one is full."""
        if self.young.size >= max(1, most // 2):
            self.old, self.young = self.young, Automaton()


@dataclass(slots=True)
class _Text:
    """One sequence: its own automaton, and where it stands in those of its tenant."""

    own: Automaton
    at: int = 0
    done: int = 0
    """How many tokens were read."""
    young: Automaton | None = None
    young_at: int = 0
    old: Automaton | None = None
    old_at: int = 0
    old_matched: int = 0


@method("suffix", family="retrieval")
class Suffix(Drafter):
    """Drafts what followed the longest known ending of the text, in this request or earlier ones.

    Where the ending was followed by different tokens their frequencies decide: likely continuations
    are drafted deep, split ones branch, and what is unlikelier than `least` is left out. The longest
    match wins, the request's own text before that of others. Tenants (salts) share nothing.

    Paper: SuffixDecoding (Oliaro et al., 2024); SAM Decoding (Hu et al., 2024)
    Exactness: exact
    Needs: nothing
    Cost per step: up to `size` further nodes; microseconds per token read and drafted; about half a
      kilobyte per token of the request, and of `memory` tokens of earlier answers
    """

    PORTION = 2048
    """How many tokens are read after one pass: a long prompt is spread over several."""

    def __init__(
        self, *, size: int = 16, branch: int = 3, least: float = 0.04, memory: int = 32768
    ) -> None:
        if size < 1 or branch < 1 or not 0 <= least < 1 or memory < 0:
            raise ValueError("needs size >= 1, branch >= 1, 0 <= least < 1 and memory >= 0")
        self.size = size
        self.branch = branch
        self.least = least
        self.memory = memory
        self._memories = PerTenant(_Memory)

    def demand(self, view: View) -> Demand:
        state: _Text | None = view.state
        if state is None or view.limit - view.end <= 1:
            return Demand()
        return Demand(most=self.size, gain=1.0)

    def guess(self, view: View, room: int) -> Guessing:
        yield from ()
        state: _Text | None = view.state
        if state is None or state.done < len(view.tokens):
            return Guess()
        source, (at, matched) = self._longest(state)
        return self._grow(source, at, matched, min(room, self.size), view.limit - view.end - 1)

    def _longest(self, state: _Text) -> tuple[Automaton, tuple[int, int]]:
        """The longest ending that was continued before, and who knows it."""
        source = state.own
        found = source.continued(state.at, state.done)
        for rival, at, matched in (
            (state.young, state.young_at, 1 << 30),
            (state.old, state.old_at, state.old_matched),
        ):
            if rival is not None and at > 0:
                known = rival.continued(at, min(matched, rival.length[at]))
                if known[1] > found[1]:
                    source, found = rival, known
        return source, found

    def _grow(self, source: Automaton, at: int, matched: int, room: int, deepest: int) -> Guess:
        """The likeliest continuations, best first: paths compete by the product of their chances."""
        guess = Guess()
        if at == 0:
            return guess
        add, followers, branch, least = guess.add, source.followers, self.branch, self.least
        heap: list[tuple[float, int, int, int, int, float, int]] = []
        parent, score, depth, order = -1, 1.0, 0, 0
        last = len(TRUST) - 1
        while True:
            if depth < deepest:
                known = matched + depth
                bucket = known if known < last else last
                for token, place, share in followers(at, branch):
                    chance = TRUST[bucket] * share
                    if score * chance >= least:
                        order += 1
                        item = (-score * chance, order, parent, token, place, share, depth)
                        heapq.heappush(heap, item)
            if not heap or len(guess) >= room:
                return guess
            negative, _, parent, token, at, share, depth = heapq.heappop(heap)
            known = min(matched + depth, last)
            parent = add(token, parent, _sign(known, share), TRUST[known] * share)
            score, depth = -negative, depth + 1

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> _Text:
        state: _Text = view.state or _Text(Automaton())
        memory = self._memories.of(view.salt)
        if self.memory:
            memory.age(self.memory)
            if state.young is not memory.young:
                state.young, state.young_at = memory.young, 0
                state.old, state.old_at, state.old_matched = memory.old, 0, 0
        worth = view.prompt_length - TAIL
        for token in view.tokens[state.done : state.done + self.PORTION]:
            state.at = state.own.read(state.at, token)
            if state.young is not None and state.old is not None and state.done >= worth:
                state.young_at = state.young.read(state.young_at, token)
                state.old_at, state.old_matched = state.old.follow(
                    state.old_at, state.old_matched, token
                )
            state.done += 1
        return state


_SIGNS = [[Sign("suffix", (known, part)) for part in range(4)] for known in range(len(TRUST))]


def _sign(known: int, share: float) -> Sign:
    """Length of the match, and whether its followers were split."""
    return _SIGNS[known][3 if share == 1.0 else 2 if share >= 0.5 else 1 if share >= 0.2 else 0]
