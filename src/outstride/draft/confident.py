"""`confident`: the target predicts several tokens at once and keeps a run of sure ones. Lossy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from outstride.core.contracts import Acceptor, Demand, Drafter, Rounds
from outstride.core.graph import NodeId, Position, TokenId, chain
from outstride.core.proposal import Proposal, Scores, Verdict, Wants
from outstride.core.sampling import LogitsProcessors, best
from outstride.core.sequence import View
from outstride.core.softmax import log_softmax
from outstride.registry import method


@method("confident", family="lexical units")
class ConfidentRuns(Drafter, Acceptor):
    """Placeholders after the text let the target guess further tokens; a run of sure ones stays.

    It changes the text: tokens after the first are written without having seen those before them,
    and nothing checks them. They stay while the target's probability is at least `sure`. It needs a
    model that was tuned to predict after the placeholder `pad`; others are seldom sure, and then this
    is plain decoding with idle nodes. Under a grammar, each token is chosen among those that may
    follow the tokens accepted before it.

    Paper: Lexical Unit Decoding (Sun et al., 2024): its decoding, without its fine-tuning
    Exactness: lossy
    Needs: a target tuned on placeholders
    Cost per step: `length` further nodes, which leave nothing in the cache
    """

    def __init__(self, *, length: int = 3, pad: int = 0, sure: float = 0.9) -> None:
        if length < 1 or pad < 0 or not 0 < sure <= 1:
            raise ValueError("needs length >= 1, pad >= 0 and 0 < sure <= 1")
        self.length = length
        self.pad = pad
        self.sure = sure
        self.input_tokens = (pad,)

    def demand(self, view: View) -> Demand:
        return Demand(max_nodes=max(0, min(self.length, view.limit - view.end - 1)), gain=1.0)

    def propose(self, view: View, budget: int) -> Rounds:
        yield from ()
        given = view.given()
        count = max(0, min(budget, self.length, view.limit - view.end - 1))
        placeholders = chain([self.pad] * count, view.end, probe=True)
        wants = Wants(logprobs=0, logits=view.grammar is not None)
        return Proposal(given.grow(placeholders), len(given), wants=wants)

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        graph, text = proposal.graph, view.tokens[view.prompt_length :]
        settled: dict[Position, TokenId] = {}
        for node in map(NodeId, range(proposal.root, len(graph))):
            position = Position(int(graph.positions[node]) + 1)
            found = self._token(view, proposal, scores, node, text)
            if found is None or (settled and found[1] < math.log(self.sure)):
                break
            settled[position] = TokenId(found[0])
            text = [*text, found[0]]
            if view.closing(position, found[0]):
                break
        return Verdict(settled=settled, keep=tuple(NodeId(i) for i in range(proposal.given)))

    @staticmethod
    def _token(
        view: View, proposal: Proposal, scores: Scores, node: NodeId, text: Sequence[int]
    ) -> tuple[int, float] | None:
        """The token after a node and its log-probability; None where nothing may follow the text.

        The engine attached the grammar's mask for what was settled before the pass; for placeholders
        it is replaced by the one for the tokens accepted since.
        """
        row = scores.row(node)
        if view.grammar is None or node == proposal.root:
            return scores.logprobs[row][0]
        allowed = view.grammar.allowed(text)
        if scores.logits is None or (allowed is not None and not allowed.any()):
            return None
        processors = proposal.processors.get(node, LogitsProcessors())
        processed = replace(processors, allowed=allowed).apply(scores.logits[row])
        position = int(proposal.graph.positions[node]) + proposal.offset
        token = int(best(processed, proposal.sampling, position)[0])
        return token, float(log_softmax(scores.logits[row])[token])
