"""`judge`: a trained judge passes drafted tokens that the target would have worded otherwise. Lossy."""

from __future__ import annotations

from outstride.core.contracts import Acceptor, Rounds
from outstride.core.graph import NodeId, Position, TokenId
from outstride.core.proposal import Proposal, Scores, Verdict, Wants
from outstride.core.sequence import View
from outstride.draft.draft import DraftModelDrafter
from outstride.registry import method


@method("judge", family="draft model")
class JudgeDecoding(DraftModelDrafter, Acceptor):
    """A smaller model's tokens stay where a trained judge finds that the target could have said them.

    It changes the text. Tokens that the target puts there itself hold as ever; of others, the judge
    looks at the target's hidden state after them, and passes those that are right with a probability
    of `sure` or more. `from` names the folder of the judge, which was trained on the target's own
    answers.

    Paper: Judge Decoding (Bachmann et al., 2025)
    Exactness: lossy
    Needs: draft model, trained judge
    Cost per step: as for `draft`; a few thousand products on the host for each token in doubt
    """

    head_kind = "judge"

    def __init__(
        self, *, model: str, from_: str, length: int = 6, width: int = 1, sure: float = 0.9
    ) -> None:
        super().__init__(model=model, length=length, width=width)
        if not 0 < sure <= 1:
            raise ValueError("needs sure above 0 and up to 1")
        self.judge = from_
        self.sure = sure

    def propose(self, view: View, budget: int) -> Rounds:
        drafted = yield from self.draft_tree(view, budget)
        wants = Wants(hidden=(view.filter(self.judge).layer,)) if len(drafted) else None
        return drafted.proposal(view, wants)

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        """Follows the target's tokens down the draft, or else the child that the judge rates best."""
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
        """The child that is likeliest to be right, if the judge is sure enough of it."""
        children = proposal.graph.children(node)
        if not children:
            return None
        judge = view.filter(self.judge)
        states = scores.hidden[judge.layer]
        first = len(proposal.graph) - len(states)
        rates = judge.of_hidden_states(states[[child - first for child in children]])
        best = int(rates.argmax())
        return children[best] if rates[best] >= self.sure else None
