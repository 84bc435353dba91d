"""`Unmask`: what all acceptors for masked models have in common. They say which guesses to settle."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from outstride.core.canvas import Sheet, chance_at, recall
from outstride.core.contracts import Acceptor
from outstride.core.graph import FloatArray, NodeId, Position, TokenId
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sequence import View


@dataclass(frozen=True, slots=True)
class Guess:
    """What the model would put at an open position: its seeded sample, or its likeliest token."""

    position: int
    token: int
    logprob: float
    """Of the token, under the raw logits."""
    node: NodeId
    row: int
    """The line of the scores that it comes from."""
    forced: bool
    """Whether a token that is read for good scored it, and so nothing will score it again."""

    @property
    def chance(self) -> float:
        return float(np.exp(self.logprob))


def guesses(proposal: Proposal, scores: Scores, nodes: Iterable[int] | None = None) -> list[Guess]:
    """A guess for each position that was scored (by these nodes), from left to right."""
    found = []
    for node in scores.nodes.tolist() if nodes is None else nodes:
        row = scores.row(NodeId(node))
        token, value = scores.logprobs[row][0]
        position = int(proposal.graph.positions[node]) + proposal.offset
        forced = node < proposal.given
        found.append(Guess(position, token, value, NodeId(node), row, forced))
    return sorted(found, key=lambda guess: guess.position)


def surest(found: Iterable[Guess]) -> list[Guess]:
    """By falling confidence; of equals, the leftmost first."""
    return sorted(found, key=lambda guess: (-guess.logprob, guess.position))


def softmax(row: FloatArray) -> FloatArray:
    """Probabilities of raw logits, in double precision."""
    weights = np.exp(row.astype(np.float64) - float(row.max()))
    shares: FloatArray = weights / weights.sum()
    return shares


def entropy(row: FloatArray) -> float:
    """In nats, of raw logits."""
    p = softmax(row)
    return float(-(p * np.log(np.maximum(p, 1e-30))).sum())


def logits(scores: Scores, guess: Guess) -> FloatArray:
    """The raw row behind a guess."""
    if scores.logits is None:
        raise KeyError("logits were not wanted")
    row: FloatArray = scores.logits[guess.row]
    return row


def value_of(guess: Guess, scores: Scores, order: str, view: View, clock: int) -> float:
    """By what a guess is ranked: the largest comes first."""
    if order == "margin":
        first, second = (v for _, v in scores.logprobs[guess.row][1:3])
        return float(np.exp(first) - np.exp(second))
    if order == "entropy":
        return -entropy(logits(scores, guess))
    if order == "random":
        return chance_at(view, clock, guess.position)
    if order == "steady":
        return round(math.exp(guess.logprob), 2)
    return guess.logprob


def ranked(
    found: Iterable[Guess], scores: Scores, order: str, view: View, clock: int
) -> list[Guess]:
    """Guesses in the order in which they are to be settled; what is forced comes first."""

    def rank(guess: Guess) -> tuple[bool, float, int]:
        return not guess.forced, -value_of(guess, scores, order, view, clock), guess.position

    return sorted(found, key=rank)


class Unmask(Acceptor):
    """Settles some of the guesses; what a pass keeps follows from the way the model sees."""

    def __init__(self, *, cache: str = "none") -> None:
        self.cache = cache

    @abstractmethod
    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Guess]
    ) -> list[Guess] | None:
        """The guesses to settle; with none, the surest is. None: nothing is to be settled yet."""

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        found = guesses(proposal, scores)
        keep = tuple(NodeId(node) for node in range(proposal.given))
        if not found:
            return idle(view, keep)
        chosen = self.choose(view, proposal, scores, found)
        if chosen is not None and not chosen:
            chosen = [guess for guess in found if guess.forced] or surest(found)[:1]
        settled = admissible(view, found, chosen or [])
        return Verdict(
            settled={Position(g.position): TokenId(g.token) for g in settled},
            keep=keep,
            reuse=self.reused(view, proposal),
            nodes={Position(g.position): g.node for g in settled},
            note=self.note(view, proposal, scores, found, settled),
        )

    def note(
        self,
        view: View,
        proposal: Proposal,
        scores: Scores,
        found: list[Guess],
        settled: list[Guess],
    ) -> object:
        """What to be told again at the next step."""
        return None

    def reused(self, view: View, proposal: Proposal) -> tuple[NodeId, ...]:
        """Entries of a full canvas are stale as soon as a token is settled; some reuse them."""
        if self.cache == "none":
            return ()
        return tuple(NodeId(node) for node in range(len(proposal.graph)))


def idle(view: View, keep: tuple[NodeId, ...]) -> Verdict:
    """The verdict on a pass without masks, because another model was not ready.

    Where the last token that was read scores the first place of a block, it must be read again, with
    the block.
    """
    masking = view.masking()
    if masking is not None and masking.shifted:
        keep = () if view.block() is not None else keep[:-1]
    return Verdict(keep=keep, note=recall(view).note)


def admissible(view: View, found: list[Guess], chosen: list[Guess]) -> list[Guess]:
    """What may be settled of what was chosen, from left to right.

    What is forced is settled in any case. Under a grammar tokens are settled without gaps, for as
    long as it allows them.
    """
    places, grammar = {guess.position: guess for guess in chosen}, view.grammar
    if grammar is None:
        settled = [places.get(g.position, g) for g in found if g.forced or g.position in places]
        return sorted(settled, key=lambda guess: guess.position)
    sheet, by_place = Sheet(view), {g.position: g for g in found} | places
    allowed: list[Guess] = []
    text = view.tokens[view.prompt_length :]
    position = int(view.end)
    while position < sheet.stop:
        known, guess = sheet.token(position), by_place.get(position)
        if known is None:
            if guess is None or (allowed and guess.position not in places):
                break
            mask = grammar.allowed(text)
            if mask is not None and not mask[guess.token]:
                break
            allowed.append(guess)
            known = guess.token
        text = [*text, known]
        position += 1
    return allowed
