"""Tri-grams estimated on line: what the target puts behind two tokens, learnt as it speaks."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from outstride.core.contracts import Demand, Drafter, Guessing
from outstride.core.guess import Guess, PerTenant, Sign
from outstride.core.proposal import Proposal, Scores, Verdict, Wants
from outstride.core.sequence import View
from outstride.registry import method

SHARES = (0.7, 0.15, 0.09, 0.06)
"""What one pass says about the candidates behind a node."""
NOTHING = -1
"""Stands before the first token of a text."""
KINDS = 4
"""How many candidates of a context are remembered for long."""
MOST = 16.0
"""From so many sights on, old ones fade."""
LEAST = 0.02
"""Paths that are unlikelier are not followed."""


class _Context:
    """What followed a context: how often it was seen, and the weights of its candidates."""

    __slots__ = ("seen", "weights")

    def __init__(self, weights: dict[int, float]) -> None:
        self.seen = 1.0
        self.weights = weights

    def fade(self) -> None:
        """Forgets weak candidates, and halves what is long known, so that changes are noticed."""
        half = 0.5 if self.seen > MOST else 1.0
        best = sorted(self.weights.items(), key=lambda item: -item[1])[:KINDS]
        self.weights = {token: weight * half for token, weight in best}
        self.seen *= half


class Estimates:
    """P(next | two tokens before), and P(next | one token before) from contexts that were new.

    Of each kind there are at most `most`; the oldest make room for new ones.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._pairs: dict[tuple[int, int], _Context] = {}
        self._singles: dict[int, _Context] = {}

    def __len__(self) -> int:
        return len(self._pairs) + len(self._singles)

    def learn(
        self,
        lines: Iterable[tuple[tuple[int, int], Sequence[int]]],
        shares: Sequence[float] = (1.0,),
    ) -> None:
        """Enters candidates, best first, that followed contexts: their last two tokens."""
        pairs, singles = self._pairs, self._singles
        for pair, tokens in lines:
            found = pairs.get(pair)
            if found is None:  # the shorter context hears only of what is new to the longer one
                pairs[pair] = _Context(dict(zip(tokens, shares, strict=False)))
                found = singles.get(pair[1])
                if found is None:
                    singles[pair[1]] = _Context(dict(zip(tokens, shares, strict=False)))
                    continue
            weights = found.weights
            for token, share in zip(tokens, shares, strict=False):
                weights[token] = weights.get(token, 0.0) + share
            found.seen += 1.0
            if found.seen > MOST or len(weights) > 2 * KINDS:
                found.fade()
        while len(pairs) > self._most:
            del pairs[next(iter(pairs))]
        while len(singles) > self._most:
            del singles[next(iter(singles))]

    def find(self, before: int, last: int) -> tuple[int, _Context | None]:
        """What is known behind two tokens, and how many of them it goes by."""
        found = self._pairs.get((before, last))
        return (2, found) if found is not None else (1, self._singles.get(last))


@method("trigram", family="retrieval")
class Trigram(Drafter):
    """Drafts the likeliest paths of a tri-gram model that is estimated while the target speaks.

    The prompt and the candidates of every scored node teach it. Paths are searched best first; a
    candidate whose estimate rests on little is given the benefit of the doubt (`explore`), so that
    the tree widens where the model is unsure. Tenants (salts) share no estimates.

    Paper: ADED, Adaptive Draft-Verification (Liu et al., 2024)
    Exactness: exact
    Needs: nothing
    Cost per step: up to `size` further nodes, and four candidates for each scored node; about half a
      kilobyte for each of at most `contexts` contexts
    """

    wants = Wants(best=len(SHARES))
    PORTION = 2048
    """How much of a prompt is read after one pass."""

    def __init__(self, *, size: int = 16, explore: float = 0.3, contexts: int = 16384) -> None:
        if size < 1 or explore < 0 or contexts < 2:
            raise ValueError("needs size >= 1, explore >= 0 and contexts >= 2")
        self.size = size
        self.explore = explore
        self._estimates = PerTenant(lambda: Estimates(contexts))

    def demand(self, view: View) -> Demand:
        return Demand(most=self.size if view.limit - view.end > 1 else 0, gain=1.0)

    def guess(self, view: View, room: int) -> Guessing:
        yield from ()
        estimates, tokens = self._estimates.of(view.salt), view.tokens
        guess, room, deepest = Guess(), min(room, self.size), view.limit - view.end - 1
        add, find, push, explore = guess.add, estimates.find, heapq.heappush, self.explore
        last, before = tokens[-1], tokens[-2] if len(tokens) > 1 else NOTHING
        heap: list[tuple[float, int, int, int, int, float, list[Sign], int]] = []
        parent, priority, depth, order = -1, 1.0, 0, 0
        while True:
            size, known = find(before, last)
            if known is not None and depth < deepest:
                seen = known.seen
                doubt = explore / (1.0 + seen)
                signs = _SIGNS[size][0 if seen < 2 else 1 if seen < 5 else 2]
                for token, weight in known.weights.items():
                    chance = weight / (seen + 0.5)
                    hope = chance + doubt
                    score = priority * hope if hope < 1.0 else priority
                    if score > LEAST and token >= 0:  # -1: filters left no further candidate
                        order += 1
                        push(heap, (-score, order, parent, last, token, chance, signs, depth + 1))
            if not heap or len(guess) >= room:
                return guess
            score, _, parent, before, last, chance, signs, depth = heapq.heappop(heap)
            parent = add(last, parent, signs[int(chance * 5)], chance)
            priority = -score

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> int:
        estimates, tokens = self._estimates.of(view.salt), view.tokens
        done: int = view.state or 0
        end = min(view.prompt_length - 1, done + self.PORTION)
        if done < end and view.index == 0:  # the other samples have the same prompt
            text = tokens[done : end + 1]
            contexts = zip([tokens[done - 1] if done else NOTHING, *text], text, strict=False)
            estimates.learn(zip(contexts, ([token] for token in text[1:]), strict=False))
        graph, nodes = proposal.graph, scores.nodes
        before = graph.tokens[graph.parents[nodes]].tolist()
        if graph.parents[nodes[0]] < 0:  # the topmost hangs below what is cached
            place = int(graph.positions[nodes[0]]) - 1
            before[0] = tokens[place] if place >= 0 else NOTHING
        contexts = zip(before, graph.tokens[nodes].tolist(), strict=True)
        estimates.learn(zip(contexts, scores.best.tolist(), strict=True), SHARES)
        return end


_SIGNS = [
    [[Sign("trigram", (size, seen, part)) for part in range(5)] for seen in range(3)]
    for size in range(3)
]
"""By tokens that the estimate goes by, how often they were seen, and the estimate itself."""
