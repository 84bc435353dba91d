"""`rooted`: drafts that start from several of the target's own next tokens. Lossy."""

from __future__ import annotations

from outstride.core.contracts import Acceptor, Demand, Rounds
from outstride.core.graph import NodeId, Position, TokenId, tree
from outstride.core.proposal import Proposal, Scores, Verdict, Wants
from outstride.core.sequence import View
from outstride.draft.tree_expansion import Branch, DraftModelExpansion
from outstride.registry import method


@method("rooted", family="draft model")
class RootedTrees(DraftModelExpansion, Acceptor):
    """The target leaves its next token open between its `width` best; the longest draft decides.

    It changes the text: of several tokens that the target might have said, the one is taken after
    which most of the smaller model's draft holds. (Kept exact, the first of them would always win: a
    candidate drawn from the target's own distribution is never refused. That is the token which
    other methods settle at the end of a pass.) With `width` 1 the text is that of plain decoding.
    Of the paper, the trees that start from the target's tokens are here; its rejection sampling, its
    dynamic tree mask and its decision model that ends a draft early are not.

    Paper: Improving Multi-candidate Speculative Decoding (Lu et al., 2024): its target-initialised
      trees alone
    Exactness: lossy
    Needs: draft model
    Cost per step: `length` passes of the draft model, shared, and length * width further nodes
    """

    def __init__(self, *, model: str, length: int = 4, width: int = 3) -> None:
        super().__init__(model=model, length=length, width=width)
        self.wants = Wants(best=width)

    def demand(self, view: View) -> Demand:
        roots, depth = len(view.state or ()), min(self.length, view.limit - view.end)
        return Demand(min_nodes=min(roots, 1), max_nodes=roots * depth, gain=0.5 * depth)

    def depth(self, view: View, budget: int) -> int:
        roots = len(view.state or ())
        return min(self.length, view.limit - view.end, -(-budget // roots)) if roots else 0

    def branches(self, view: View, scores: Scores, above: Branch, at: int) -> list[Branch]:
        if above.place < 0:
            return [Branch(token, -1) for token in view.state]
        return [Branch(scores.token(above.node), above.place)]

    def propose(self, view: View, budget: int) -> Rounds:
        given = view.given()
        found = (yield from self.expand(view, budget))[:budget]  # one level after the other
        if not found and budget > 0:
            found = [Branch(token, -1) for token in view.state or ()][:budget]
        drafted = tree([b.token for b in found], [b.parent for b in found], view.end)
        return Proposal(given.grow(drafted), len(given), wants=self.wants)

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        """Settles the longest walk along the target's own tokens from any of the first tokens.

        The target's token after the walk stays open, together with the next best ones: the next
        draft starts from them.
        """
        graph = proposal.graph
        longest: list[NodeId] = []
        for first in graph.children(proposal.root):
            walk, node = [first], graph.follow(first, scores.token(first))
            while node is not None:
                walk.append(node)
                node = graph.follow(node, scores.token(node))
            longest = max(longest, walk, key=len)
        settled = {
            Position(int(graph.positions[node])): TokenId(int(graph.tokens[node]))
            for node in longest
        }
        keep = [NodeId(i) for i in range(proposal.given)]
        return Verdict(settled=settled, keep=(*keep, *longest))

    def observe(
        self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict
    ) -> list[int]:
        return [int(token) for token in scores.candidates(verdict.keep[-1])]
