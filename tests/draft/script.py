"""A target with a scripted answer, for drafters that need no model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from outstride import registry
from outstride.core.contracts import CAUSAL, Drafter
from outstride.core.draft_tree import DraftTree
from outstride.core.graph import NodeId
from outstride.core.params import SamplingParams
from outstride.core.prefix_key import PrefixKey
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sequence import BlockTable, Sequence, View

registry.discover()
MATCH = registry.build("plain").acceptor


class Script:
    """One request whose answer is known. `candidates` gives the target's top candidates after a path.

    The path is all tokens up to a node; on the way of the answer, its next token comes first.
    """

    def __init__(
        self,
        drafter: Drafter,
        prompt: list[int],
        answer: list[int],
        *,
        salt: str = "",
        candidates: Callable[[list[int]], list[int]] = lambda path: [],
    ) -> None:
        self.drafter = drafter
        self.answer = answer
        self.candidates = candidates
        self.sequence = Sequence(
            id=0,
            request=0,
            tokens=list(prompt),
            prompt_length=len(prompt),
            params=SamplingParams(max_tokens=len(answer)),
            seed=0,
            method=registry.build("plain"),
            limit=len(prompt) + len(answer),
            key=PrefixKey(tenant=salt),
        )
        self.sequence.group.append(self.sequence)
        self.passes = 0
        self.accepted = 0

    @property
    def view(self) -> View:
        read = list(range(len(self.sequence.tokens) - 1))
        self.sequence.tables["target"] = BlockTable(positions=read)
        return View(self.sequence, {"target": CAUSAL}, self.sequence.limit, allotted=1)

    @property
    def done(self) -> bool:
        return len(self.sequence.output) == len(self.answer)

    def draft(self, budget: int = 64) -> DraftTree:
        """The drafter's tree for the text so far."""
        rounds = self.drafter.draft_tree(self.view, budget)
        try:
            next(rounds)
        except StopIteration as stop:
            draft: DraftTree = stop.value
            return draft
        raise AssertionError("it asked a model")

    def step(self, budget: int = 64) -> Proposal:
        """One pass over what the drafter proposes."""
        view = self.view
        rounds = self.drafter.propose(view, budget)
        try:
            next(rounds)
        except StopIteration as stop:
            proposal: Proposal = stop.value
        assert len(proposal.graph) <= proposal.given + budget
        scores = self._score(proposal)
        verdict = MATCH.accept(view, proposal, scores)
        tokens = list(verdict.settled.values())[: len(self.answer) - len(self.sequence.output)]
        self.sequence.tokens += map(int, tokens)
        self.passes += 1
        self.accepted += len(tokens) - 1
        self.observe(view, proposal, scores, verdict)
        return proposal

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> None:
        self.sequence.state = self.drafter.observe(view, proposal, scores, verdict)

    def run(self) -> Script:
        """To the end of the answer."""
        while not self.done:
            self.step()
        start = self.sequence.prompt_length
        assert self.sequence.tokens[start:] == self.answer
        return self

    def _score(self, proposal: Proposal) -> Scores:
        graph, best = proposal.graph, max(1, proposal.wants.best)
        whole = self.sequence.tokens[: self.sequence.prompt_length] + self.answer
        table = np.full((len(graph), best), -1, dtype=np.int64)
        for node in range(len(graph)):
            inside = [int(graph.tokens[n]) for n in graph.path(NodeId(node))]
            path = self.sequence.tokens[: int(graph.positions[0])] + inside
            found = list(self.candidates(path))
            if path == whole[: len(path)] and len(path) < len(whole):
                found = [whole[len(path)], *(t for t in found if t != whole[len(path)])]
            row = (found or [0])[:best]
            table[node, : len(row)] = row
        return Scores(nodes=np.arange(proposal.root, len(graph)), best=table[proposal.root :])


def paths(draft: DraftTree) -> list[list[int]]:
    """Every leaf of a draft tree, as the tokens that lead to it."""
    found = []
    for leaf in sorted(set(range(len(draft))) - set(draft.parents)):
        path, node = [], leaf
        while node >= 0:
            path.append(draft.tokens[node])
            node = draft.parents[node]
        found.append(path[::-1])
    return found
