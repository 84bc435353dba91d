"""What a step costs against the number of nodes in its pass: measured at first, corrected on line.

Nodes that read a prompt are reckoned apart: each looks at all that is cached before it, so that the
same number of them costs the more, the further a prompt has been read.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import le
from statistics import median
from typing import TypeAlias

HALF, TILE = 8, 16
"""So many rows kernels take at a time: the next one costs more than those before it."""
FULL = 0.75
"""A piece of a prompt that is cut where a tile ends keeps at least so much of itself."""
CACHED = 128
"""Behind so many entries the curve is measured."""
FURTHER = 0.35
"""What each further sequence adds to what drafting costs."""
RESTED = 8
"""After so many steps without a draft of its kind, what was usual for long counts once more."""
STEPS, FEW = 127, 15
"""Of so many steps, or of a few while there are no more, the one in the middle is the usual one."""
Pieces: TypeAlias = Sequence[tuple[int, int]]
"""Parts of a pass, one of each sequence: how many nodes, behind how many entries."""


class Reading:
    """Seconds by which a pass takes longer because pieces of prompts are read in it.

    A piece costs so much for each of its nodes (`node`), so much for each entry that a node looks at
    (`look`), and so much for each entry that it has to fetch at all (`fetch`). After each step, the
    parts that made up most of what was foreseen are corrected most; not where a pass costs about the
    same whatever its size: there, what it took says nothing about nodes, and `flat` is what it takes.

    What it costs while nothing else holds the machine up (`calm`) falls with it at once, and rises
    slowly: how large the next piece may be is a matter of the moment, how patient others have to be
    until all is read is not. Whoever is more patient because the machine is slow waits twice as long.
    """

    DEARER, CHEAPER = 0.35, 0.15
    """How fast what was dearer than foreseen is believed, and what was cheaper: others wait for it."""
    LASTING = 1.001
    """By how much, after a step, what stays dear counts as what it costs in calm times."""

    def __init__(
        self, node: float, look: float = 0.0, fetch: float = 0.0, *, flat: float = 0.0
    ) -> None:
        self.node, self.look, self.fetch, self.flat = node, look, fetch, flat
        self._calm: tuple[float, ...] = node, look, fetch

    @property
    def calm(self) -> Reading:
        """The same at what it costs in calm times."""
        return Reading(*self._calm, flat=self.flat)

    def seconds(self, nodes: int, cached: int) -> float:
        """What a piece of so many nodes costs behind so many entries."""
        return sum(self._parts(nodes, cached)) if nodes else 0.0

    def _parts(self, nodes: int, cached: int) -> tuple[float, float, float]:
        looks = nodes * (cached + 0.5 * nodes)
        return self.node * nodes, self.look * looks, self.fetch * cached

    def fits(self, seconds: float, cached: int) -> int:
        """The largest piece that costs no more than this behind so many entries."""
        left, each, bend = seconds - self.fetch * cached, self.node + self.look * cached, self.look
        if left <= 0.0:
            return 0
        return int(2.0 * left / (each + math.sqrt(each * each + 2.0 * bend * left)))

    def observe(self, pieces: Pieces, seconds: float) -> None:
        """Enters by how much a pass took longer because of these pieces."""
        if self.flat:
            return
        node, look, fetch = map(sum, zip(*(self._parts(*piece) for piece in pieces), strict=True))
        foreseen = node + look + fetch
        ratio = min(max(seconds / foreseen, 0.5), 2.0)
        quick = self.DEARER if ratio > 1.0 else self.CHEAPER
        self.node *= ratio ** (quick * node / foreseen)
        self.look *= ratio ** (quick * look / foreseen)
        self.fetch *= ratio ** (quick * fetch / foreseen)
        calm = (self.LASTING * part for part in self._calm)
        parts = self.node, self.look, self.fetch
        self._calm = tuple(map(min, parts, calm))


class Drafts(enum.Enum):
    """How drafts are made, and what that is taken to cost until it was seen, in plain passes."""

    LOOKED = 0.05
    """Looked up."""
    ASKED = 0.3
    """By a trained part."""
    FORESEEN = 0.31
    """By a trained part for a lone sequence, where the pass over it is under way before it is known.
    Not quite the same value, or an enumeration would take both for one."""

    @classmethod
    def of(cls, asking: int, *, foreseen: bool) -> Drafts:
        """When so many ask trained parts."""
        return cls.FORESEEN if foreseen else cls.ASKED if asking else cls.LOOKED


class _Spent:
    """Seconds by which a step takes longer for the sake of drafts, of the last few steps that made any.

    While none makes any, what was usual for long comes back: a slow spell has not the last word.
    """

    def __init__(self, first: float) -> None:
        self.seconds = first
        self._few, self._many = deque([first], maxlen=FEW), deque([first], maxlen=STEPS)
        self._resting = 0

    def observe(self, seconds: float) -> None:
        self._few.append(seconds)
        self._many.append(seconds)
        self.seconds, self._resting = median(self._few), 0

    def rest(self) -> None:
        """One more step without."""
        self._resting += 1
        if self._resting % RESTED == 0:
            self._few.append(sorted(self._many)[len(self._many) // 4])
            self.seconds = median(self._few)


class Cost:
    """Seconds of a step, straight lines between knots, the last line going on for ever.

    After each step the knots near it follow what it took, those further off by less. Somebody else on
    the machine may slow passes over several nodes down, which compute, and hardly those over one,
    which wait for memory: whoever drafts all the time learns nothing of what a plain pass would have
    taken. If all has become slower, that shows once a plain one is taken. A curve that was given, not
    measured, stays as it is.
    """

    QUICK, REACH = 0.2, 0.6
    """How fast a knot follows a step of its size, and how much less one of half or twice the size."""

    def __init__(self, seconds: Mapping[int, float], *, frozen: bool = False) -> None:
        if not seconds or min(seconds) < 1 or min(seconds.values()) <= 0:
            raise ValueError("a cost curve needs positive seconds for numbers of nodes from 1 on")
        self._knots = sorted(seconds)
        self._values = _rising([float(seconds[n]) for n in self._knots])
        self._frozen = frozen
        self._curve: list[float] = []
        node = (self._values[-1] - self._values[0]) / max(self._knots[-1] - self._knots[0], 1)
        self.reading = Reading(max(node, 0.01 * self._values[0]))
        """What it costs beside others that talk."""
        self._behind = float(CACHED)
        """Behind how many entries sequences stood, on average, when the curve was last corrected."""
        self._first = list(self._values)
        self._origin: list[float] = []
        self._pulled: dict[int, list[float]] = {}
        self._paces: deque[float] = deque(maxlen=STEPS)
        """How long recent steps took, against the curve as it was at first: logarithms."""
        self._seconds: deque[float] = deque(maxlen=STEPS)
        """How long they took, less what reading prompts takes."""
        self._drafts = {kind: _Spent(kind.value * self._values[0]) for kind in Drafts}

    @property
    def usual(self) -> float:
        """Seconds of a usual step, drafts and all, without what reads prompts; 0 if none is known."""
        return median(self._seconds) if len(self._seconds) >= FEW else 0.0

    def drafting(self, count: int, kind: Drafts) -> float:
        """Seconds by which a step takes longer while drafts are made for so many sequences."""
        return self._drafts[kind].seconds * (1.0 + FURTHER * (count - 1))

    def observe_drafting(self, count: int, seconds: float, kind: Drafts) -> None:
        """Enters how much longer a step took while drafts were made for so many sequences.

        That may be less than nothing where the curve was measured without foresight.
        """
        if not self._frozen:
            self._drafts[kind].observe(seconds / (1.0 + FURTHER * (count - 1)))

    def rest(self) -> None:
        """Enters that no trained part was asked in a step."""
        if not self._frozen:
            self._drafts[Drafts.ASKED].rest()
            self._drafts[Drafts.FORESEEN].rest()

    @property
    def knots(self) -> dict[int, float]:
        """The curve as it stands."""
        return dict(zip(self._knots, self._values, strict=True))

    def curve(self, nodes: int) -> list[float]:
        """Seconds for 0 to `nodes` nodes; more nodes never cost less."""
        if len(self._curve) <= nodes:
            self._curve = _line(self._knots, self._values, max(nodes, 1))
        return self._curve

    def talking(self, pieces: Pieces) -> float:
        """Seconds of a pass over those who talk, the further on they are, the more."""
        nodes = sum(size for size, _ in pieces)
        look, fetch = self.reading.look, self.reading.fetch
        further = sum((look * size + fetch) * (cached - self._behind) for size, cached in pieces)
        usual = self.curve(nodes)[nodes]
        return self._calm(nodes) * max(usual + further, 0.5 * usual)

    def _calm(self, nodes: int) -> float:
        """What is usual against what the curve says, which the last few steps may have pushed up."""
        if len(self._paces) < FEW:
            return 1.0
        return math.exp(min(median(self._paces) - self._drift(nodes), 0.0))

    def _drift(self, nodes: int) -> float:
        """How far the curve has moved at this place: a logarithm."""
        nodes = min(nodes, self._knots[-1])
        if len(self._origin) <= nodes:
            self._origin = _line(self._knots, self._first, nodes)
        return math.log(self.curve(nodes)[nodes] / self._origin[nodes])

    def observe(
        self, nodes: int, seconds: float, pieces: Pieces = (), talking: Pieces = ()
    ) -> None:
        """Enters what a step took; one step says little, for something else may have held it up.

        If some of its nodes only read prompts, in `pieces`, what these cost beside those who talk is
        told apart: that reading on gets dearer is no fault of the curve.
        """
        if self._frozen or nodes < 1 or seconds <= 0.0:
            return
        if pieces:
            if talking:
                read = sum(self.reading.seconds(*piece) for piece in pieces)
                self._seconds.append(max(seconds - read, 0.0))
                self.reading.observe(pieces, seconds - self.talking(talking))
            return
        if talking:
            behind = sum(cached for _, cached in talking) / len(talking)
            self._behind += self.QUICK * (behind - self._behind)
        self._seconds.append(seconds)
        ratio = min(max(seconds / self.curve(nodes)[nodes], 0.5), 2.0)
        self._paces.append(self._drift(nodes) + math.log(ratio))
        moved = math.log(ratio)
        self._values = _rising(
            [
                value * math.exp(moved * pull)
                for pull, value in zip(self._pulls(nodes), self._values, strict=True)
            ]
        )
        self._curve = []

    def _pulls(self, nodes: int) -> list[float]:
        """How far each knot follows a step of so many nodes."""
        nodes = min(nodes, self._knots[-1])
        if nodes not in self._pulled:
            here = math.log2(nodes)
            self._pulled[nodes] = [
                self.QUICK * self.REACH ** abs(math.log2(knot) - here) for knot in self._knots
            ]
        return self._pulled[nodes]


def _line(knots: list[int], values: list[float], nodes: int) -> list[float]:
    """Straight lines between knots, for 0 to `nodes`; the last one goes on, and none falls."""
    found = [values[0]] * (knots[0] + 1)
    for (left, low), (right, high) in pairwise(zip(knots, values, strict=True)):
        slope = (high - low) / (right - left)
        found += [low + slope * (n - left) for n in range(left + 1, right + 1)]
    slope = 0.0
    if len(knots) > 1:
        slope = max((values[-1] - values[-2]) / (knots[-1] - knots[-2]), 0.0)
    found += [values[-1] + slope * (n - knots[-1]) for n in range(knots[-1] + 1, nodes + 1)]
    return found


def evened(beside: int, most: int) -> int:
    """How many of `most` nodes to add to those beside them, so that no tile is begun for a few."""
    whole = (beside + most) // TILE * TILE - beside
    return whole if whole >= FULL * most else most


def _rising(values: list[float]) -> list[float]:
    """The nearest values that never fall: neighbours in the wrong order become their mean."""
    if all(map(le, values, values[1:])):
        return values
    groups: list[tuple[float, int]] = []
    for value in values:
        total, count = value, 1
        while groups and groups[-1][0] / groups[-1][1] > total / count:
            more, members = groups.pop()
            total, count = total + more, count + members
        groups.append((total, count))
    return [total / count for total, count in groups for _ in range(count)]
