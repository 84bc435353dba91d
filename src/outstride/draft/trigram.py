"""`trigram`: a tri-gram model of the target, estimated online while it decodes."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from outstride.core.contracts import Demand, Drafter, DraftRounds
from outstride.core.draft_tree import AcceptanceKey, DraftTree, PerPrefixKey
from outstride.core.proposal import Proposal, Scores, Verdict, Wants
from outstride.core.sequence import View
from outstride.registry import method

SHARES = (0.7, 0.15, 0.09, 0.06)
"""The weights of the candidates after a node, best first, that one pass adds."""
NOTHING = -1
"""Stands in for the token before the first one of a text."""
KINDS = 4
"""How many candidates of a context are remembered for long."""
MAX_COUNT = 16.0
"""A context that was seen more often has its counts halved."""
MIN_SCORE = 0.02
"""Paths with a lower score are not followed."""


class _Context:
    """A context: how often it was seen, and the weights of the tokens that followed it."""

    __slots__ = ("seen", "weights")

    def __init__(self, weights: dict[int, float]) -> None:
        self.seen = 1.0
        self.weights = weights

    def fade(self) -> None:
        """Drops weak candidates, and halves high counts, so that new tokens soon outweigh old ones."""
        half = 0.5 if self.seen > MAX_COUNT else 1.0
        best = sorted(self.weights.items(), key=lambda item: -item[1])[:KINDS]
        self.weights = {token: weight * half for token, weight in best}
        self.seen *= half


class TrigramEstimates:
    """P(next | two tokens before), and P(next | one token before) from contexts that were new.

    Of each kind at most `capacity` contexts are kept; the oldest are dropped.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._pairs: dict[tuple[int, int], _Context] = {}
        self._singles: dict[int, _Context] = {}

    def __len__(self) -> int:
        return len(self._pairs) + len(self._singles)

    def learn(
        self,
        lines: Iterable[tuple[tuple[int, int], Sequence[int]]],
        shares: Sequence[float] = (1.0,),
    ) -> None:
        """Adds candidates, best first, that followed contexts: the last two tokens before them."""
        pairs, singles = self._pairs, self._singles
        for pair, tokens in lines:
            found = pairs.get(pair)
            if found is None:  # the shorter context learns only what is new to the longer one
                pairs[pair] = _Context(dict(zip(tokens, shares, strict=False)))
                found = singles.get(pair[1])
                if found is None:
                    singles[pair[1]] = _Context(dict(zip(tokens, shares, strict=False)))
                    continue
            weights = found.weights
            for token, share in zip(tokens, shares, strict=False):
                weights[token] = weights.get(token, 0.0) + share
            found.seen += 1.0
            if found.seen > MAX_COUNT or len(weights) > 2 * KINDS:
                found.fade()
        while len(pairs) > self._capacity:
            del pairs[next(iter(pairs))]
        while len(singles) > self._capacity:
            del singles[next(iter(singles))]

    def find(self, before: int, last: int) -> tuple[int, _Context | None]:
        """The estimate after two tokens, and how many of them it is based on."""
        found = self._pairs.get((before, last))
        return (2, found) if found is not None else (1, self._singles.get(last))


@method("trigram", family="retrieval")
class Trigram(Drafter):
    """Drafts the likeliest paths of a tri-gram model that is estimated while the target decodes.

    It learns from the prompt and from the candidates of every scored node. Paths are searched best
    first; a candidate whose estimate rests on few observations gets a bonus (`explore`), so that the
    tree widens where the model is unsure. Tenants and adapters share no estimates.

    Paper: ADED, Adaptive Draft-Verification (Liu et al., 2024)
    Exactness: exact
    Needs: nothing
    Cost per step: up to `size` further nodes, and four candidates for each scored node; about half a
      kilobyte for each of at most `contexts` contexts
    """

    wants = Wants(best=len(SHARES))
    PORTION = 2048
    """How many tokens of a prompt are learned from after one pass."""

    def __init__(self, *, size: int = 16, explore: float = 0.3, contexts: int = 16384) -> None:
        if size < 1 or explore < 0 or contexts < 2:
            raise ValueError("needs size >= 1, explore >= 0 and contexts >= 2")
        self.size = size
        self.explore = explore
        self._estimates = PerPrefixKey(lambda: TrigramEstimates(contexts))

    def demand(self, view: View) -> Demand:
        return Demand(max_nodes=self.size if view.limit - view.end > 1 else 0, gain=1.0)

    def draft_tree(self, view: View, budget: int) -> DraftRounds:
        yield from ()
        estimates, tokens = self._estimates.peek(view.key), view.tokens
        draft, budget, max_depth = DraftTree(), min(budget, self.size), view.limit - view.end - 1
        add, find, push, explore = draft.add, estimates.find, heapq.heappush, self.explore
        last, before = tokens[-1], tokens[-2] if len(tokens) > 1 else NOTHING
        heap: list[tuple[float, int, int, int, int, float, list[AcceptanceKey], int]] = []
        parent, priority, depth, order = -1, 1.0, 0, 0
        while True:
            size, known = find(before, last)
            if known is not None and depth < max_depth:
                seen = known.seen
                bonus = explore / (1.0 + seen)
                keys = _KEYS[size][0 if seen < 2 else 1 if seen < 5 else 2]
                for token, weight in known.weights.items():
                    rate = weight / (seen + 0.5)
                    raised = rate + bonus
                    score = priority * raised if raised < 1.0 else priority
                    if score > MIN_SCORE and token >= 0:  # -1: filters left no further candidate
                        order += 1
                        push(heap, (-score, order, parent, last, token, rate, keys, depth + 1))
            if not heap or len(draft) >= budget:
                return draft
            score, _, parent, before, last, rate, keys, depth = heapq.heappop(heap)
            parent = add(last, parent, keys[int(rate * 5)], rate)
            priority = -score

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> int:
        estimates, tokens = self._estimates.of(view.key), view.tokens
        done: int = view.state or 0
        end = min(view.prompt_length - 1, done + self.PORTION)
        if done < end and view.index == 0:  # the other samples have the same prompt
            text = tokens[done : end + 1]
            contexts = zip([tokens[done - 1] if done else NOTHING, *text], text, strict=False)
            estimates.learn(zip(contexts, ([token] for token in text[1:]), strict=False))
        graph, nodes = proposal.graph, scores.nodes
        before = graph.tokens[graph.parents[nodes]].tolist()
        if graph.parents[nodes[0]] < 0:  # its parent is in the KV cache
            place = int(graph.positions[nodes[0]]) - 1
            before[0] = tokens[place] if place >= 0 else NOTHING
        contexts = zip(before, graph.tokens[nodes].tolist(), strict=True)
        estimates.learn(zip(contexts, scores.best.tolist(), strict=True), SHARES)
        return end


_KEYS = [
    [[AcceptanceKey("trigram", (size, seen, part)) for part in range(5)] for seen in range(3)]
    for size in range(3)
]
"""By the tokens that the estimate is based on, how often they were seen, and the estimate."""
