"""A regular expression over tokens: which token leads from which state to which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import interegular
import numpy as np

from outstride.core.graph import FloatArray, IntArray

IMPOSSIBLE = -1e30
"""The score of a token that cannot stand at a position."""


@dataclass(frozen=True, slots=True)
class PathSlot:
    """One position of a path: its scores, or the one token that is settled there.

    `endings` are the tokens with which the text may end here.
    """

    scores: FloatArray | None
    token: int | None
    endings: tuple[int, ...]


class TokenAutomaton:
    """The states of a pattern, with transitions by whole tokens.

    `transitions[s]` maps each state that can follow s to the tokens that lead there. `distance[s]` is
    the number of tokens on the shortest way to a complete text. One more state, `done`, follows an end
    token: every token may come after it.
    """

    def __init__(
        self, pattern: str, token_to_bytes: Callable[[int], bytes], vocab_size: int
    ) -> None:
        machine = interegular.parse_pattern(pattern).to_fsm()
        states = sorted(machine.states)
        number = {state: i for i, state in enumerate(states)}
        self.size = len(states)
        self.done = self.size
        self.initial = number[machine.initial]
        self.final = {number[state] for state in machine.finals}
        classes = 1 + max((int(c) for moves in machine.map.values() for c in moves), default=0)
        dead = self.size
        table = np.full((self.size + 1, classes + 1), dead, dtype=np.int32)
        for state, moves in machine.map.items():
            for kind, following in moves.items():
                if following in number:
                    table[number[state], int(kind)] = number[following]
        codes = _character_classes(machine.alphabet, token_to_bytes, vocab_size, classes)
        self._next = np.full((self.size, vocab_size), dead, dtype=np.int32)
        for start in range(self.size):
            here = np.full(vocab_size, start, dtype=np.int32)
            for column in codes.T:
                moving = column >= 0
                here[moving] = table[here[moving], column[moving]]
            here[codes[:, 0] < 0] = dead  # tokens without text lead nowhere
            self._next[start] = here
        self.transitions = [self._transitions(state, dead) for state in range(self.size)]
        self.distance = self._distances()

    def _transitions(self, state: int, dead: int) -> dict[int, IntArray]:
        row = self._next[state]
        return {int(t): np.flatnonzero(row == t) for t in np.unique(row) if t != dead}

    def _distances(self) -> list[float]:
        distance = [0.0 if state in self.final else float("inf") for state in range(self.size)]
        for _ in range(self.size):
            for state, targets in enumerate(self.transitions):
                nearest = min((distance[t] for t in targets), default=float("inf"))
                distance[state] = min(distance[state], nearest + 1.0)
        return distance

    def after(self, state: int, token: int, endings: tuple[int, ...] = ()) -> int | None:
        """The state after a token; None if the pattern does not allow the token."""
        if state == self.done:
            return state
        if token in endings:
            return self.done if state in self.final else None
        following = int(self._next[state, token])
        return None if following == self.size else following

    def read(self, tokens: list[int]) -> int | None:
        """The state after a text; None if the pattern does not allow the text."""
        state: int | None = self.initial
        for token in tokens:
            state = None if state is None else self.after(state, token)
        return state

    def best_path(
        self, state: int, slots: list[PathSlot], tokens_left: int
    ) -> list[int | None] | None:
        """The tokens of the best path over the slots that `tokens_left` more tokens can complete.

        A position after the end of the text has None. Returns None if there is no such path.
        """
        reached: dict[int, float] = {state: 0.0}
        trail: list[dict[int, tuple[int, int | None]]] = []
        for slot in slots:
            following: dict[int, float] = {}
            back: dict[int, tuple[int, int | None]] = {}
            for origin, total in reached.items():
                for target, token, score in self._moves(origin, slot):
                    if total + score > following.get(target, IMPOSSIBLE):
                        following[target] = total + score
                        back[target] = (origin, token)
            reached = following
            trail.append(back)
        ends = {
            s: v for s, v in reached.items() if s == self.done or self.distance[s] <= tokens_left
        }
        if not ends:
            return None
        here = max(ends, key=lambda s: (ends[s], -s))
        path: list[int | None] = []
        for back in reversed(trail):
            here, token = back[here]
            path.append(token)
        return path[::-1]

    def _moves(self, state: int, slot: PathSlot) -> list[tuple[int, int | None, float]]:
        """The states that a slot can lead to, each with its best token and the token's score."""
        if state == self.done:
            return [(state, None, 0.0)]
        if slot.token is not None:
            following = self.after(state, slot.token, slot.endings)
            return [] if following is None else [(following, slot.token, 0.0)]
        scores = slot.scores
        if scores is None:
            return []
        moves: list[tuple[int, int | None, float]] = []
        for target, tokens in self.transitions[state].items():
            allowed = [t for t in tokens if t not in slot.endings] if slot.endings else tokens
            if len(allowed):
                token = int(allowed[int(np.argmax(scores[allowed]))])
                moves.append((target, token, float(scores[token])))
        if state in self.final and slot.endings:
            token = max(slot.endings, key=lambda t: float(scores[t]))
            moves.append((self.done, token, float(scores[token])))
        return [move for move in moves if move[2] > IMPOSSIBLE]


def _character_classes(
    alphabet: interegular.fsm.Alphabet,
    token_to_bytes: Callable[[int], bytes],
    size: int,
    classes: int,
) -> IntArray:
    """The classes of each token's characters, then -1; a token that is no text has `classes`."""
    known = []
    for token in range(size):
        try:
            text = token_to_bytes(token).decode()
        except UnicodeDecodeError:  # a part of a character
            known.append([classes])
            continue
        known.append([int(alphabet[letter]) for letter in text])
    longest = max(1, max(map(len, known), default=1))
    codes = np.full((size, longest), -1, dtype=np.int64)
    for token, kinds in enumerate(known):
        codes[token, : len(kinds)] = kinds
    return codes
