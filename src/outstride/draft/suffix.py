"""`suffix`: the longest known suffix of the text tells what followed it, and how often."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import islice

from outstride.core.contracts import Demand, Drafter, DraftRounds
from outstride.core.draft_tree import AcceptanceKey, DraftTree, PerPrefixKey
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sequence import View
from outstride.registry import method

MATCH_PRIOR = (0.0, 0.4, 0.55, 0.65, 0.72, 0.76, 0.8, 0.83, 0.86, 0.9)
"""The prior acceptance rate of a token that always followed a match of this length."""
TAIL = 8
"""How much of a prompt is remembered with its answer: enough to know how answers begin."""


class SuffixAutomaton:
    """Every run of tokens in the texts that were added, and how often each occurred.

    A suffix automaton: a state stands for runs that always occurred together, `length` is that of the
    longest one, and `link` leads to the next shorter suffix. Adding takes constant time per token.
    """

    __slots__ = ("after", "count", "length", "link", "size")
    DEEPEST = 32
    """Counts are kept for this many suffixes of a text, the longest ones."""

    def __init__(self) -> None:
        self.after: list[dict[int, int]] = [{}]
        self.length = [0]
        self.link = [-1]
        self.count = [0]
        self.size = 0

    def extend(self, at: int, token: int) -> int:
        """Adds a token to a text whose state is `at`; returns its new state."""
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
        """The state whose longest run is that of `at` and the token; split off if need be."""
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
        """The longest known suffix after one more token, and its length; nothing is added."""
        while at > 0 and token not in self.after[at]:
            at = self.link[at]
            matched = self.length[at]
        found = self.after[at].get(token)
        return (0, 0) if found is None else (found, matched + 1)

    def continued(self, at: int, matched: int) -> tuple[int, int]:
        """The longest suffix that something followed."""
        while at > 0 and not self.after[at]:
            at = self.link[at]
            matched = self.length[at]
        return at, matched

    def followers(self, at: int, limit: int) -> list[tuple[int, int, float]]:
        """Tokens that followed here, most frequent first: token, state, share."""
        after, count = self.after[at], self.count
        if len(after) == 1:
            [(token, place)] = after.items()
            return [(token, place, 1.0)]
        latest = list(islice(reversed(after.items()), 32))  # the latest win ties
        total = 0
        for _, place in latest:
            total += count[place]
        latest.sort(key=lambda item: -count[item[1]])
        return [(token, place, count[place] / total) for token, place in latest[:limit]]


@dataclass(slots=True)
class _Memory:
    """The automata of a tenant's earlier answers: the young one grows, the old one is dropped next."""

    young: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    old: SuffixAutomaton = field(default_factory=SuffixAutomaton)

    def age(self, capacity: int) -> None:
        """Drops the old half once the young one is full."""
        if self.young.size >= max(1, capacity // 2):
            self.old, self.young = self.young, SuffixAutomaton()


@dataclass(slots=True)
class _Text:
    """One sequence: its own automaton, and its states in those of its tenant."""

    own: SuffixAutomaton
    at: int = 0
    done: int = 0
    """How many tokens were added."""
    young: SuffixAutomaton | None = None
    young_at: int = 0
    old: SuffixAutomaton | None = None
    old_at: int = 0
    old_matched: int = 0


@method("suffix", family="retrieval")
class Suffix(Drafter):
    """Drafts what followed the longest known ending of the text, in this request or earlier ones.

    Where the ending was followed by different tokens their frequencies decide: likely continuations
    are drafted deep, split ones branch, and paths with a rate below `min_prob` are left out. The
    longest match wins, the request's own text before that of others. Tenants and adapters share
    nothing.

    Paper: SuffixDecoding (Oliaro et al., 2024); SAM Decoding (Hu et al., 2024)
    Exactness: exact
    Needs: nothing
    Cost per step: up to `size` further nodes; microseconds per token added and drafted; about half a
      kilobyte per token of the request, and of `memory` tokens of earlier answers
    """

    PORTION = 2048
    """How many tokens are added after one pass: a long prompt is spread over several."""

    def __init__(
        self, *, size: int = 16, branch: int = 3, min_prob: float = 0.04, memory: int = 32768
    ) -> None:
        if size < 1 or branch < 1 or not 0 <= min_prob < 1 or memory < 0:
            raise ValueError("needs size >= 1, branch >= 1, 0 <= min_prob < 1 and memory >= 0")
        self.size = size
        self.branch = branch
        self.min_prob = min_prob
        self.memory = memory
        self._memories = PerPrefixKey(_Memory)

    def demand(self, view: View) -> Demand:
        state: _Text | None = view.state
        if state is None or view.limit - view.end <= 1:
            return Demand()
        return Demand(max_nodes=self.size, gain=1.0)

    def draft_tree(self, view: View, budget: int) -> DraftRounds:
        yield from ()
        state: _Text | None = view.state
        if state is None or state.done < len(view.tokens):
            return DraftTree()
        source, (at, matched) = self._longest(state)
        return self._grow(source, at, matched, min(budget, self.size), view.limit - view.end - 1)

    def _longest(self, state: _Text) -> tuple[SuffixAutomaton, tuple[int, int]]:
        """The automaton with the longest suffix that was continued before; its state and length."""
        source = state.own
        found = source.continued(state.at, state.done)
        for other, at, matched in (
            (state.young, state.young_at, 1 << 30),
            (state.old, state.old_at, state.old_matched),
        ):
            if other is not None and at > 0:
                known = other.continued(at, min(matched, other.length[at]))
                if known[1] > found[1]:
                    source, found = other, known
        return source, found

    def _grow(
        self, source: SuffixAutomaton, at: int, matched: int, budget: int, max_depth: int
    ) -> DraftTree:
        """The likeliest continuations, best first: paths compete by the product of their rates."""
        draft = DraftTree()
        if at == 0:
            return draft
        add, followers, branch, min_prob = draft.add, source.followers, self.branch, self.min_prob
        heap: list[tuple[float, int, int, int, int, float, int]] = []
        parent, score, depth, order = -1, 1.0, 0, 0
        last = len(MATCH_PRIOR) - 1
        while True:
            if depth < max_depth:
                known = matched + depth
                bucket = known if known < last else last
                for token, place, share in followers(at, branch):
                    rate = MATCH_PRIOR[bucket] * share
                    if score * rate >= min_prob:
                        order += 1
                        item = (-score * rate, order, parent, token, place, share, depth)
                        heapq.heappush(heap, item)
            if not heap or len(draft) >= budget:
                return draft
            negative, _, parent, token, at, share, depth = heapq.heappop(heap)
            known = min(matched + depth, last)
            parent = add(token, parent, _key(known, share), MATCH_PRIOR[known] * share)
            score, depth = -negative, depth + 1

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> _Text:
        state: _Text = view.state or _Text(SuffixAutomaton())
        memory = self._memories.of(view.key)
        if self.memory:
            memory.age(self.memory)
            if state.young is not memory.young:
                state.young, state.young_at = memory.young, 0
                state.old, state.old_at, state.old_matched = memory.old, 0, 0
        worth = view.prompt_length - TAIL
        for token in view.tokens[state.done : state.done + self.PORTION]:
            state.at = state.own.extend(state.at, token)
            if state.young is not None and state.old is not None and state.done >= worth:
                state.young_at = state.young.extend(state.young_at, token)
                state.old_at, state.old_matched = state.old.follow(
                    state.old_at, state.old_matched, token
                )
            state.done += 1
        return state


_KEYS = [
    [AcceptanceKey("suffix", (known, part)) for part in range(4)]
    for known in range(len(MATCH_PRIOR))
]


def _key(known: int, share: float) -> AcceptanceKey:
    """The key for the length of the match and the share of the token among its followers."""
    return _KEYS[known][3 if share == 1.0 else 2 if share >= 0.5 else 1 if share >= 0.2 else 0]
