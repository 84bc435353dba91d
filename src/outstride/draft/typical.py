"""`typical`: drafted tokens that the target finds likely enough stay. Lossy."""

from __future__ import annotations

import numpy as np

from outstride.core.contracts import Acceptor
from outstride.core.graph import FloatArray, NodeId, Position, TokenId
from outstride.core.proposal import Proposal, Scores, Verdict, Wants
from outstride.core.sequence import View
from outstride.draft.draft import DraftModelDrafter
from outstride.registry import method


@method("typical", family="draft model")
class TypicalAcceptance(DraftModelDrafter, Acceptor):
    """A smaller model's tokens stay wherever the target finds them likely enough.

    It changes the text: where several tokens would do, the draft model's choice is taken and not the
    target's, so the distribution leans towards the draft model's. A token is likely enough above
    `epsilon`, or above `delta` * exp(-entropy) where the target itself is undecided. Greedy requests
    keep their text.

    Paper: typical acceptance of Medusa (Cai et al., 2024)
    Exactness: lossy
    Needs: draft model
    Cost per step: as for `draft`
    """

    wants = Wants(rows=True)

    def __init__(
        self,
        *,
        model: str,
        length: int = 4,
        width: int = 2,
        epsilon: float = 0.09,
        delta: float = 0.3,
    ) -> None:
        super().__init__(model=model, length=length, width=width)
        if not (0 < epsilon <= 1 and 0 < delta <= 1):
            raise ValueError("needs epsilon and delta above 0 and up to 1")
        self.epsilon = epsilon
        self.delta = delta

    def threshold(self, p: FloatArray) -> float:
        """The probability that a token needs under the distribution p."""
        some = p[p > 0].astype(np.float64)
        entropy = -float((some * np.log(some)).sum())
        return min(self.epsilon, self.delta * float(np.exp(-entropy)))

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        """Takes the longest path of tokens above the threshold, then one token of the target."""
        graph, end = proposal.graph, proposal.root
        depth = {end: 0}
        for node in map(NodeId, range(proposal.given, len(graph))):
            above = NodeId(int(graph.parents[node]))
            if above not in depth:
                continue
            p = scores.probabilities(above)
            if p[graph.tokens[node]] >= self.threshold(p):
                depth[node] = depth[above] + 1
                if depth[node] > depth[end]:
                    end = node
        path = graph.path(end)
        settled = {
            Position(int(graph.positions[node])): TokenId(int(graph.tokens[node]))
            for node in path[proposal.given :]
        }
        settled[Position(int(graph.positions[end]) + 1)] = scores.token(end)
        return Verdict(settled=settled, keep=tuple(path))
