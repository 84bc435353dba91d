"""`guided`: a method whose drafts follow the request's grammar.

Text that the grammar forces is drafted without a model (jump-forward); tokens that it forbids are
removed from drafts before the pass. Neither changes the text of an exact method: drafts are only
proposals.
"""

from __future__ import annotations

from dataclasses import replace

from outstride.core.contracts import Demand, Drafter, Exactness, Method, Rounds
from outstride.core.draft_tree import AcceptanceKey, DraftTree
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sequence import View
from outstride.grammar.matcher import GrammarMatcher

JUMP_FORWARD = AcceptanceKey("grammar")
JUMP_FORWARD_RATE = 0.95
"""How often the target encodes forced text with the same tokens as the tokenizer."""


def guided(method: Method, matcher: GrammarMatcher) -> Method:
    """The method with drafts that follow the grammar; plain and lossy methods stay as they are."""
    drafter = method.drafter
    if method.exactness is not Exactness.EXACT or not drafter.prunable:
        return method
    return replace(method, drafter=GuidedDrafter(drafter, matcher))


class GuidedDrafter(Drafter):
    """A drafter whose draft trees contain only what the grammar allows."""

    def __init__(self, inner: Drafter, matcher: GrammarMatcher) -> None:
        self._inner = inner
        self._matcher = matcher
        self.name, self.models, self.wants = inner.name, inner.models, inner.wants
        self.cost_aware = inner.cost_aware

    def _forced(self, view: View) -> tuple[int, ...]:
        space = view.limit - view.end - 1
        return self._matcher.jump_forward(view.tokens[view.prompt_length :])[: max(space, 0)]

    def demand(self, view: View) -> Demand:
        if count := len(self._forced(view)):
            gains = tuple(JUMP_FORWARD_RATE**depth for depth in range(1, count + 1))
            if self.cost_aware:
                return Demand(gains=gains)
            return Demand(max_nodes=count, gain=sum(gains))
        return self._inner.demand(view)

    def on_backoff(self, view: View, steps: int) -> None:
        self._inner.on_backoff(view, steps)

    def propose(self, view: View, budget: int) -> Rounds:
        forced = self._forced(view)[:budget] if budget > 0 else ()
        if forced:
            if self.models:
                yield from self._inner.propose(view, 0)  # its model prefills
            tree = DraftTree()
            tree.add_run(forced, JUMP_FORWARD, JUMP_FORWARD_RATE)
        elif budget > 0:
            tree = self._allowed(view, (yield from self._inner.draft_tree(view, budget)))
        else:
            return (yield from self._inner.propose(view, budget))
        proposal = tree.proposal(view, self.wants)
        proposal.labels = {proposal.given + i: key.source for i, key in enumerate(tree.keys)}
        return proposal

    def _allowed(self, view: View, tree: DraftTree) -> DraftTree:
        """The nodes of a draft tree that the grammar allows."""
        output, kept, places = view.tokens[view.prompt_length :], DraftTree(), {-1: -1}
        paths = {-1: output}
        nodes = zip(tree.tokens, tree.parents, tree.keys, tree.rates, strict=True)
        for i, (token, parent, key, rate) in enumerate(nodes):
            if parent in places and self._matcher.allows(paths[parent], token):
                places[i] = kept.add(token, places[parent], key, rate)
                paths[i] = [*paths[parent], token]
        return kept

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> object:
        return self._inner.observe(view, proposal, scores, verdict)
