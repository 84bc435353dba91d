"""The likeliest block that a pattern allows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from outstride.accept.automaton import IMPOSSIBLE, Automaton, Slot
from outstride.accept.unmask import Guess, Unmask, logits, softmax
from outstride.core.canvas import Sheet
from outstride.core.graph import FloatArray
from outstride.core.proposal import Proposal, Scores
from outstride.core.sampling import gumbel
from outstride.core.sequence import View
from outstride.errors import InvalidParams, MethodFailed
from outstride.registry import acceptor


@acceptor("regex")
class Regex(Unmask):
    """Settles by a threshold, but only tokens of the best path that the pattern allows.

    Whatever is settled lies on one path to a complete text, so there always is a way on.
    """

    def __init__(self, *, pattern: str, threshold: float, block: int) -> None:
        super().__init__()
        self.pattern = pattern
        self.threshold = threshold
        self.block = block
        self._automaton: tuple[object, Automaton] | None = None

    def _machine(self, view: View) -> Automaton:
        spell = view.spell
        if spell is None:
            raise MethodFailed("regex needs an engine that can tell how tokens are spelled")
        if self._automaton is None or self._automaton[0] != spell:
            self._automaton = (spell, Automaton(self.pattern, spell, view.vocab_size))
        return self._automaton[1]

    def choose(
        self, view: View, proposal: Proposal, scores: Scores, found: list[Guess]
    ) -> list[Guess]:
        machine, sheet = self._machine(view), Sheet(view)
        stop = max(sheet.block(self.block).stop, found[-1].position + 1)
        by_place, slots = {guess.position: guess for guess in found}, []
        places = range(sheet.end, min(stop, sheet.stop))
        for place in places:
            guess = by_place.get(place)
            row = None if guess is None else self._scores(proposal, scores, guess)
            slots.append(Slot(row, sheet.token(place), tuple(view.endings(place))))
        state = machine.read(self._text(view, sheet))
        path = None
        if state is not None:
            path = machine.best_path(state, slots, view.limit - places.stop)
        if path is None:
            raise InvalidParams(
                f"no text of at most {view.limit - view.prompt_length} tokens matches the pattern "
                f"{self.pattern!r}; allow more tokens"
            )
        chosen = []
        for place, token in zip(places, path, strict=True):
            if token is not None and place in by_place:
                guess = by_place[place]
                chance = float(softmax(logits(scores, guess))[token])
                logprob = float(np.log(max(chance, 1e-30)))
                chosen.append(replace(guess, token=token, logprob=logprob))
        sure = [guess for guess in chosen if guess.forced or guess.chance >= self.threshold]
        return sure or [max(chosen, key=lambda guess: (guess.logprob, -guess.position))]

    def _text(self, view: View, sheet: Sheet) -> list[int]:
        """The answer up to the first gap."""
        return [
            token
            for place in range(view.prompt_length, sheet.end)
            if (token := sheet.token(place)) is not None
        ]

    def _scores(self, proposal: Proposal, scores: Scores, guess: Guess) -> FloatArray:
        """Log-probabilities of all tokens at a place, with rules and, if sampled, with noise."""
        row, draw, rules = logits(scores, guess), proposal.draw, proposal.rules.get(guess.node)
        if rules is not None:
            row = rules.apply(row)
        x = row.astype(np.float64) / (draw.temperature or 1.0)
        x -= x.max()
        x -= np.log(np.exp(x).sum())
        if draw.temperature > 0.0:
            x += gumbel(draw, guess.position, np.arange(len(row)))
        return np.maximum(x, IMPOSSIBLE).astype(np.float32)
