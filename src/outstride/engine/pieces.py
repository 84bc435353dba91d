"""How much of a prompt a pass may read while others talk, so that these hardly wait.

What is usual for those who talk is what a pass took when the prompt came. While it is read they go on,
and each token that they add makes passes longer, prompt or not: whoever reads in small pieces to be
kind is kind for a long time, and in the end there is nothing left to be kind with. So it is foreseen
how long passes have to be for the rest of the prompt to be read without ever taking longer than that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from outstride.engine.cost import Cost, Pieces, Reading, evened

PATIENCE, MOST = 1.75, 4.0
"""How many times as long as is usual a pass may take while a prompt is read, and how many times if the
prompt is so long that it has to. If more sequences read than talk, so many times more: then those who
wait are the others."""
PROGRESS = 4
"""Nodes that a prompt may read in any case."""
AGAIN = 8
"""After so many pieces, what is to come is foreseen anew."""
PARTS, HALVINGS = 12, 5
"""In so many parts the rest of a prompt is read in thought, and so often the bounds are closed in."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Somebody whose prompt is not read yet."""

    id: int
    cached: int
    pending: int


@dataclass(frozen=True, slots=True)
class Talker:
    """Somebody who waits for the next token."""

    id: int
    nodes: int
    cached: int


class Chunking:
    """Sizes of pieces of prompts, pass by pass."""

    def __init__(self) -> None:
        self._oldest = -1
        self._stood: dict[int, int] = {}
        """Behind how many entries those who talk stood when the oldest reader began to read."""
        self._patience: dict[int, tuple[int, float]] = {}
        """Of each reader: how many pieces it has had, and how patient the others have to be."""

    def begin(self, oldest: int) -> None:
        """A new pass; what is usual is what was when the oldest of those who read began."""
        if oldest != self._oldest:
            self._oldest = oldest
            self._stood.clear()
            self._patience.clear()

    def most(
        self, cost: Cost, reader: Reader, pieces: Pieces, talkers: Sequence[Talker], readers: int
    ) -> int:
        """Nodes that this reader may have in a pass beside these pieces and those who talk.

        What a piece costs depends on how much of the prompt is cached already: later ones are smaller.
        """
        talking = [(talker.nodes, talker.cached) for talker in talkers]
        beside = sum(nodes for nodes, _ in talking)
        stood = [(t.nodes, self._stood.setdefault(t.id, t.cached)) for t in talkers]
        # Where passes can be foreseen, one in which somebody reads is not: that is not for its size.
        usual, now = (max(cost.talking(some), cost.reading.flat) for some in (stood, talking))
        count, patience = self._patience.get(reader.id, (0, PATIENCE))
        if count % AGAIN == 0:
            growth = cost.talking([(nodes, cached + 1) for nodes, cached in talking]) - now
            if count:  # answers that drafts help along grow faster
                growth = max(growth, (now - usual) / count)
            patience = foreseen(cost.reading.calm, reader, usual, now, growth)
        self._patience[reader.id] = count + 1, patience
        left = patience * max(1.0, readers / beside) * usual - now
        left -= sum(cost.reading.seconds(*piece) for piece in pieces)
        most = cost.reading.fits(left, reader.cached)
        most = evened(beside + sum(nodes for nodes, _ in pieces), most)
        return most if pieces else max(most, PROGRESS)


def spare(cost: Cost, pieces: Pieces, talking: Pieces, most: int) -> int:
    """How many of `most` nodes drafts may have in a pass in which prompts are read.

    No more than passes with drafts and without prompts have room for, patience included: else those
    whose drafts begin to hold while somebody reads would wait for their own drafts, too.
    """
    left = PATIENCE * cost.usual - cost.talking(talking)
    left -= sum(cost.reading.seconds(*piece) for piece in pieces)
    nodes = sum(size for size, _ in talking)
    curve = cost.curve(nodes + most)
    return max(bisect_right(curve, curve[nodes] + left, nodes, nodes + most + 1) - 1 - nodes, 0)


def foreseen(reading: Reading, reader: Reader, usual: float, now: float, growth: float) -> float:
    """How patient those who talk have to be for a prompt to be read to its end in equal passes.

    usual, now, growth: seconds of a pass without it, when it came and now, and by how much it grows.
    """
    least, most = PATIENCE, MOST
    if _ends(reading, reader, least * usual, now, growth):
        return least
    for _ in range(HALVINGS):
        middle = 0.5 * (least + most)
        if _ends(reading, reader, middle * usual, now, growth):
            most = middle
        else:
            least = middle
    return most


def _ends(reading: Reading, reader: Reader, seconds: float, now: float, growth: float) -> bool:
    """Whether a prompt can be read to its end in passes that never take longer than this."""
    cached, left = float(reader.cached), float(reader.pending)
    part = left / PARTS
    while left > 0.0:
        piece = reading.fits(seconds - now, int(cached))
        if piece < PROGRESS:
            return False
        step = min(left, max(part, piece))
        now += growth * step / piece
        cached += step
        left -= step
    return True
