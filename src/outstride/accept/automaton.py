"""A regular expression over tokens: which token leads from which state to which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import interegular
import numpy as np

from outstride.core.graph import FloatArray, IntArray

IMPOSSIBLE = -1e30


@dataclass(frozen=True, slots=True)
class Slot:
    """One position of a path: its scores, or the one token that stands there already.

    `endings` are the tokens with which the text may end here.
    """

    scores: FloatArray | None
    token: int | None
    endings: tuple[int, ...]


class Automaton:
    """States of a pattern, moved from by whole tokens.

    `ways[s]` lists, for each state that can follow s, the tokens that lead there. `distance[s]` is how
    many tokens the shortest way to a complete text has. One more state, `done`, follows an end token:
    what comes behind it does not matter.
    """

    def __init__(self, pattern: str, spell: Callable[[int], bytes], vocab_size: int) -> None:
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
        codes = _codes(machine.alphabet, spell, vocab_size, classes)
        self._next = np.full((self.size, vocab_size), dead, dtype=np.int32)
        for start in range(self.size):
            here = np.full(vocab_size, start, dtype=np.int32)
            for column in codes.T:
                moving = column >= 0
                here[moving] = table[here[moving], column[moving]]
            here[codes[:, 0] < 0] = dead  # tokens without text lead nowhere
            self._next[start] = here
        self.ways = [self._ways(state, dead) for state in range(self.size)]
        self.distance = self._distances()

    def _ways(self, state: int, dead: int) -> dict[int, IntArray]:
        row = self._next[state]
        return {int(t): np.flatnonzero(row == t) for t in np.unique(row) if t != dead}

    def _distances(self) -> list[float]:
        distance = [0.0 if state in self.final else float("inf") for state in range(self.size)]
        for _ in range(self.size):
            for state, ways in enumerate(self.ways):
                nearest = min((distance[t] for t in ways), default=float("inf"))
                distance[state] = min(distance[state], nearest + 1.0)
        return distance

    def after(self, state: int, token: int, endings: tuple[int, ...] = ()) -> int | None:
        """The state behind a token; None if the pattern does not allow it."""
        if state == self.done:
            return state
        if token in endings:
            return self.done if state in self.final else None
        following = int(self._next[state, token])
        return None if following == self.size else following

    def read(self, tokens: list[int]) -> int | None:
        """The state behind a text."""
        state: int | None = self.initial
        for token in tokens:
            state = None if state is None else self.after(state, token)
        return state

    def best_path(self, state: int, slots: list[Slot], room: int) -> list[int | None] | None:
        """The tokens of the best path over the slots, after which `room` tokens are enough to end.

        None stands for a position behind the end of the text; None in place of a path, for no path.
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
        ends = {s: v for s, v in reached.items() if s == self.done or self.distance[s] <= room}
        if not ends:
            return None
        here = max(ends, key=lambda s: (ends[s], -s))
        path: list[int | None] = []
        for back in reversed(trail):
            here, token = back[here]
            path.append(token)
        return path[::-1]

    def _moves(self, state: int, slot: Slot) -> list[tuple[int, int | None, float]]:
        """Where a slot can lead, by which token, at what score: the best for each."""
        if state == self.done:
            return [(state, None, 0.0)]
        if slot.token is not None:
            following = self.after(state, slot.token, slot.endings)
            return [] if following is None else [(following, slot.token, 0.0)]
        scores = slot.scores
        if scores is None:
            return []
        moves: list[tuple[int, int | None, float]] = []
        for target, tokens in self.ways[state].items():
            allowed = [t for t in tokens if t not in slot.endings] if slot.endings else tokens
            if len(allowed):
                token = int(allowed[int(np.argmax(scores[allowed]))])
                moves.append((target, token, float(scores[token])))
        if state in self.final and slot.endings:
            token = max(slot.endings, key=lambda t: float(scores[t]))
            moves.append((self.done, token, float(scores[token])))
        return [move for move in moves if move[2] > IMPOSSIBLE]


def _codes(
    alphabet: interegular.fsm.Alphabet, spell: Callable[[int], bytes], size: int, classes: int
) -> IntArray:
    """The classes of each token's characters, -1 behind the last; `classes` for what is no text."""
    spelled = []
    for token in range(size):
        try:
            text = spell(token).decode()
        except UnicodeDecodeError:  # a part of a character
            spelled.append([classes])
            continue
        spelled.append([int(alphabet[letter]) for letter in text])
    longest = max(1, max(map(len, spelled), default=1))
    codes = np.full((size, longest), -1, dtype=np.int64)
    for token, kinds in enumerate(spelled):
        codes[token, : len(kinds)] = kinds
    return codes
