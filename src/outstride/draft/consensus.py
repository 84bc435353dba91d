"""`consensus`: samples of one request draft for each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from outstride.core.contracts import Demand, Drafter, DraftRounds
from outstride.core.draft_tree import AcceptanceKey, DraftTree
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sequence import View
from outstride.registry import method

LATEST = 32
"""How many earlier occurrences of an ending are looked at."""


@dataclass(slots=True)
class _SiblingIndex:
    """Where each pair of tokens occurs in the answers of siblings, by sibling and position."""

    indexed: dict[int, int] = field(default_factory=dict)
    """By sibling, how many of its tokens are in the index."""
    places: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)


@dataclass(slots=True)
class _Vote:
    """A token that siblings have here: their weight, and the tokens that they have next."""

    weight: float = 0.0
    siblings: set[int] = field(default_factory=set)
    next: dict[int, _Vote] = field(default_factory=dict)


@method("consensus", family="retrieval")
class Consensus(Drafter):
    """Drafts what followed the same tokens in the other samples of the same request.

    Every sibling whose answer contains the last two tokens votes for what followed there, with more
    weight the further back it agrees; votes are pooled into a tree, and where most agree it goes
    deep. A request with a single sample drafts nothing.

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
        return Demand(max_nodes=self.size, gain=1.0)

    def draft_tree(self, view: View, budget: int) -> DraftRounds:
        yield from ()
        known: _SiblingIndex | None = view.state
        if known is None or view.end < 2:
            return DraftTree()
        votes, matched = self._votes(view, known, min(self.length, view.limit - view.end - 1))
        return _elect(votes, matched, min(budget, self.size))

    def _votes(self, view: View, known: _SiblingIndex, length: int) -> tuple[_Vote, int]:
        """The votes of siblings after the last two tokens, and the longest agreement before them."""
        tokens, root, longest = view.tokens, _Vote(), 0
        texts = {sibling.index: sibling.tokens for sibling in view.siblings}
        for index, place in known.places.get((tokens[-2], tokens[-1]), ())[-LATEST:]:
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
                node.siblings.add(index)
        return root, longest

    def observe(
        self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict
    ) -> _SiblingIndex:
        known: _SiblingIndex = view.state or _SiblingIndex()
        for sibling in view.siblings:
            text, index = sibling.tokens, sibling.index
            start = known.indexed.get(index, max(view.prompt_length - 1, 1))
            for place in range(start, len(text)):
                known.places.setdefault((text[place - 1], text[place]), []).append((index, place))
            known.indexed[index] = max(start, len(text))
        return known


def _elect(root: _Vote, matched: int, budget: int) -> DraftTree:
    """The tokens with the most votes; a child never has more of them than its parent."""
    draft = DraftTree()
    waiting = [(vote.weight, -1, token, vote, root.weight, 0) for token, vote in root.next.items()]
    while waiting and len(draft) < budget:
        best = max(range(len(waiting)), key=lambda i: waiting[i][0])
        weight, parent, token, vote, total, depth = waiting.pop(best)
        share, siblings = weight / total, min(len(vote.siblings), 3)
        known = min((matched + depth) // 2, 4)
        key = AcceptanceKey("consensus", (known, siblings, int(share * 2.99)))
        parent = draft.add(token, parent, key, share * (0.4 + 0.1 * known))
        waiting += [
            (below.weight, parent, following, below, weight, depth + 1)
            for following, below in vote.next.items()
        ]
    return draft
