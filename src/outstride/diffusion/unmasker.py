"""`Unmasker`: the base of all methods for masked models. A method says which predictions to settle."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from outstride.core.contracts import Acceptor
from outstride.core.graph import FloatArray, NodeId, Position, TokenId
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sequence import View
from outstride.core.softmax import entropy, softmax
from outstride.diffusion.canvas import CanvasState, block_of, random_priority, recall, spec_of
from outstride.diffusion.masked_block import MaskedBlockDrafter


@dataclass(frozen=True, slots=True)
class Prediction:
    """The model's token for an open position: its seeded sample, or its likeliest token."""

    position: int
    token: int
    logprob: float
    """The log-probability of the token under the raw logits."""
    node: NodeId
    row: int
    """The row of the scores that it comes from."""
    forced: bool
    """Whether a token that is computed for good scored it, so that no later pass scores it again."""

    @property
    def probability(self) -> float:
        """The probability of the token under the raw logits."""
        return float(np.exp(self.logprob))


def predictions(
    proposal: Proposal, scores: Scores, nodes: Iterable[int] | None = None
) -> list[Prediction]:
    """A prediction for each position that was scored (by these nodes), from left to right."""
    rows = {node: row for row, node in enumerate(scores.nodes.tolist())}
    found = []
    for node in rows if nodes is None else nodes:
        row = rows[node]
        token, value = scores.logprobs[row][0]
        position = int(proposal.graph.positions[node]) + proposal.offset
        forced = node < proposal.given
        found.append(Prediction(position, token, value, NodeId(node), row, forced))
    return sorted(found, key=lambda prediction: prediction.position)


def by_confidence(found: Iterable[Prediction]) -> list[Prediction]:
    """Predictions by falling probability; of equals, the leftmost first."""
    return sorted(found, key=lambda prediction: (-prediction.logprob, prediction.position))


def logits_of(scores: Scores, prediction: Prediction) -> FloatArray:
    """The raw logits of a prediction."""
    if scores.logits is None:
        raise KeyError("logits were not wanted")
    row: FloatArray = scores.logits[prediction.row]
    return row


def priority(
    prediction: Prediction, scores: Scores, order: str, view: View, num_settled: int
) -> float:
    """The value by which an order ranks a prediction: the largest comes first."""
    if order == "margin":
        first, second = (v for _, v in scores.logprobs[prediction.row][1:3])
        return float(np.exp(first) - np.exp(second))
    if order == "entropy":
        return -entropy(softmax(logits_of(scores, prediction)))
    if order == "random":
        return random_priority(view, num_settled, prediction.position)
    if order == "steady":
        return round(math.exp(prediction.logprob), 2)
    return prediction.logprob


def ranked(
    found: Iterable[Prediction], scores: Scores, order: str, view: View, num_settled: int
) -> list[Prediction]:
    """Predictions in the order in which they are to be settled; forced ones come first."""

    def rank(prediction: Prediction) -> tuple[bool, float, int]:
        value = priority(prediction, scores, order, view, num_settled)
        return not prediction.forced, -value, prediction.position

    return sorted(found, key=rank)


class Unmasker(MaskedBlockDrafter, Acceptor):
    """A method for masked models: proposes a block of masks and settles some of the predictions.

    It is drafter and acceptor in one, so each option is declared once. What a pass keeps in the KV
    cache follows from the model's attention pattern.
    """

    @abstractmethod
    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Prediction]
    ) -> list[Prediction] | None:
        """The predictions to settle. An empty list: the most confident one is settled. None: nothing
        is settled by this pass."""

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        found = predictions(proposal, scores)
        keep = tuple(NodeId(node) for node in range(proposal.given))
        if not found:
            return nothing_settled(view, keep)
        chosen = self.choose(view, proposal, scores, found)
        if chosen is not None and not chosen:
            chosen = [p for p in found if p.forced] or by_confidence(found)[:1]
        settled = admissible(view, found, chosen or [])
        return Verdict(
            settled={Position(p.position): TokenId(p.token) for p in settled},
            keep=keep,
            reuse=self._reused(proposal),
            nodes={Position(p.position): p.node for p in settled},
            note=self.note(view, proposal, scores, found, settled),
        )

    def note(
        self,
        view: View,
        proposal: Proposal,
        scores: Scores,
        found: list[Prediction],
        settled: list[Prediction],
    ) -> object:
        """What the method needs at the next step, where `recall(view).note` returns it."""
        return None

    def _reused(self, proposal: Proposal) -> tuple[NodeId, ...]:
        """KV of a full canvas is stale as soon as a token is settled; some caches reuse it."""
        if self.cache == "none":
            return ()
        return tuple(NodeId(node) for node in range(len(proposal.graph)))


def nothing_settled(view: View, keep: tuple[NodeId, ...]) -> Verdict:
    """The verdict on a pass without masks, which ran because another model was not ready.

    Where the last computed token scores the first position of a block, it must be computed again,
    together with the block.
    """
    masked = spec_of(view)
    if masked is not None and masked.shifted:
        keep = () if block_of(view) is not None else keep[:-1]
    return Verdict(keep=keep, note=recall(view).note)


def admissible(view: View, found: list[Prediction], chosen: list[Prediction]) -> list[Prediction]:
    """The predictions that may be settled of those that were chosen, from left to right.

    Forced ones are settled in any case. Under a grammar, tokens are settled without gaps, and only
    as far as the grammar allows them.
    """
    picked, grammar = {p.position: p for p in chosen}, view.grammar
    if grammar is None:
        settled = [picked.get(p.position, p) for p in found if p.forced or p.position in picked]
        return sorted(settled, key=lambda prediction: prediction.position)
    canvas, at = CanvasState(view), {p.position: p for p in found} | picked
    allowed: list[Prediction] = []
    text = view.tokens[view.prompt_length :]
    position = int(view.end)
    while position < canvas.stop:
        known, prediction = canvas.token(position), at.get(position)
        if known is None:
            if prediction is None or (allowed and prediction.position not in picked):
                break
            mask = grammar.allowed(text)
            if mask is not None and not mask[prediction.token]:
                break
            allowed.append(prediction)
            known = prediction.token
        text = [*text, known]
        position += 1
    return allowed
