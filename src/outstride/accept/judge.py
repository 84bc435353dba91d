"""A trained judge decides on drafted tokens that are not the target's own. Lossy."""

from __future__ import annotations

from outstride.core.contracts import Acceptor
from outstride.core.graph import NodeId, Position, TokenId
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sequence import View
from outstride.registry import acceptor


@acceptor("judge")
class Judge(Acceptor):
    """Walks down the draft along the target's tokens, or else the child that the judge likes best."""

    def __init__(self, *, from_: str, sure: float) -> None:
        self.judge = from_
        self.sure = sure

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        graph, node = proposal.graph, proposal.root
        keep = [NodeId(given) for given in range(proposal.given)]
        settled: dict[Position, TokenId] = {}
        while True:
            token = scores.token(node)
            child = graph.follow(node, token)
            if child is None:
                child = self._passed(view, proposal, scores, node)
            if child is None:
                settled[Position(int(graph.positions[node]) + 1)] = token
                return Verdict(settled=settled, keep=tuple(keep))
            settled[Position(int(graph.positions[child]))] = TokenId(int(graph.tokens[child]))
            keep.append(child)
            node = child

    def _passed(
        self, view: View, proposal: Proposal, scores: Scores, node: NodeId
    ) -> NodeId | None:
        """The likeliest child to be right, if that is likely enough."""
        children = proposal.graph.children(node)
        if not children:
            return None
        judge = view.filter(self.judge)
        states = scores.hidden[judge.layer]
        first = len(proposal.graph) - len(states)
        chances = judge.of_states(states[[child - first for child in children]])
        best = int(chances.argmax())
        return children[best] if chances[best] >= self.sure else None
