"""Reads the target's logits and distributions for a text, through the engine's own loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from outstride.bench import chi_square
from outstride.core.contracts import Acceptor, Demand, Exactness, Method, Rounds
from outstride.core.graph import FloatArray, NodeId, Position, TokenId, chain
from outstride.core.params import SamplingParams
from outstride.core.proposal import Proposal, Scores, Verdict, Wants
from outstride.core.sequence import View
from outstride.draft.plain import Plain
from outstride.llm import LLM


class _LogitsDrafter(Plain):
    """One plain pass that wants a whole row of raw logits."""

    def propose(self, view: View, num_draft_tokens: int) -> Rounds:
        proposal = yield from super().propose(view, num_draft_tokens)
        return proposal.with_wants(Wants(logits=True))


class _LogitsAcceptor(Acceptor):
    """Keeps the row and settles its argmax, which ends the request."""

    name = "look"

    def __init__(self) -> None:
        self.logits: FloatArray | None = None

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        assert scores.logits is not None
        row = self.logits = np.asarray(scores.logits[scores.row(proposal.root)], dtype=np.float32)
        keep = tuple(NodeId(i) for i in range(proposal.given))
        return Verdict(settled={Position(int(view.end)): TokenId(int(row.argmax()))}, keep=keep)


def logits_after(llm: LLM, tokens: Sequence[int], adapter: str = "") -> FloatArray:
    """Raw logits for the token after a sequence of tokens, with this LoRA adapter."""
    acceptor = _LogitsAcceptor()
    method = Method("look", _LogitsDrafter(), acceptor, Exactness.EXACT)
    params = SamplingParams(max_tokens=1, adapter=adapter)
    llm.generate([list(tokens)], params, method=method)
    assert acceptor.logits is not None
    return acceptor.logits


class _ReplayDrafter(Plain):
    """Drafts a known text."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text = list(text)

    def demand(self, view: View) -> Demand:
        return Demand(max_nodes=min(16, view.limit - int(view.end) - 1), gain=1.0)

    def propose(self, view: View, num_draft_tokens: int) -> Rounds:
        yield from ()
        done, given = int(view.end) - view.prompt_length, view.given()
        draft = self.text[done : done + max(num_draft_tokens, 0)] if num_draft_tokens > 0 else []
        draft = draft[: max(len(self.text) - done - 1, 0)]
        graph = given.grow(chain(draft, view.end))
        return Proposal(graph, given=len(given), wants=Wants(rows=True))


class _RankAcceptor(Acceptor):
    """Settles the known text in any case and records where its tokens lie in the target's
    distributions.
    """

    name = "weigh"

    def __init__(self, text: Sequence[int], seed: int) -> None:
        self.text = list(text)
        self.positions: list[float] = []
        self.top_probabilities: list[float] = []
        self._shares = np.random.default_rng(seed)

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        done = int(view.end) - view.prompt_length
        nodes = range(int(proposal.root), len(proposal.graph))
        settled: dict[Position, TokenId] = {}
        for i, node in enumerate(nodes):
            row, token = scores.probabilities(NodeId(node)), self.text[done + i]
            self.positions.append(
                chi_square.rank_position(row, token, float(self._shares.random()))
            )
            self.top_probabilities.append(float(row.max()))
            settled[Position(int(view.end) + i)] = TokenId(token)
        return Verdict(settled=settled, keep=tuple(map(NodeId, range(len(proposal.graph)))))


def rank_positions(
    llm: LLM,
    prompt: Sequence[int],
    texts: Sequence[Sequence[int]],
    params: SamplingParams,
    seed: int,
) -> tuple[list[chi_square.Numbers], chi_square.Numbers]:
    """For each text, where its tokens lie in the target's distributions; and all top probabilities.

    The distributions are those of sampling: logits processors, temperature and filters of the
    request included.
    """
    judges = [_RankAcceptor(text, seed + i) for i, text in enumerate(texts)]
    requests = [
        (judge, replace(params, n=1, max_tokens=len(judge.text), stop=()))
        for judge in judges
        if judge.text
    ]
    if requests:
        results = llm.generate(
            [list(prompt)] * len(requests),
            [its for _, its in requests],
            method=[
                Method("weigh", _ReplayDrafter(judge.text), judge, Exactness.LOSSY)
                for judge, _ in requests
            ],
        )
        for result in results:
            if result.error is not None:
                raise result.error
    tops = np.asarray([top for judge in judges for top in judge.top_probabilities])
    return [np.asarray(judge.positions, dtype=np.float64) for judge in judges], tops
