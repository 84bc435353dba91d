"""`LearnedCurve`: seconds of a pass by its number of nodes, learned from the passes that answers make.

The curve has a reference: a shape that was measured on a similar machine, or the curve of this one. A
pass says how many times longer it took than the reference says. Each knot keeps its own recent passes,
in logarithms, and takes their median: a pass that was held up changes nothing.

A knot without recent passes follows the others, so that its cost keeps its ratio of the reference. That
matters for passes that have become rare. Drafts stop when passes over several nodes are slow, for
example while other programs use the processor. Nothing would tell that those programs are gone. As
their last passes are forgotten, drafts look worth a trial again.

There is one exception: passes over many nodes that become slower do not make passes over few nodes look
slower. Other programs slow down passes that compute and hardly those that wait for
memory, and a sequence that drafts in each step would never see a plain pass that says otherwise.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from operator import le
from statistics import median

from outstride.policy.config import AutoConfig

MIN_CHANGE, MAX_DELAY = 0.01, 8
"""The curve is estimated again once a knot has moved by this share, or after this many passes: an
estimate takes as long as a lookup."""


class _Knot:
    """What is known of passes of about one size: logarithms of their seconds against the reference."""

    def __init__(self, config: AutoConfig) -> None:
        self.recent: deque[float] = deque(maxlen=config.short_window)
        self.long: deque[float] = deque(maxlen=config.long_window)
        self.weight = 0.0
        """How many passes `level` counts as: fewer, the longer ago they were."""
        self.level: float | None = None
        """The usual value; None: no pass of this size has been seen."""
        self.stored: float | None = None
        """The value that was stored by another process, until a pass of this size is seen here."""
        self.used: float | None = None
        """`level` at the last estimate of the curve."""

    @property
    def moved(self) -> bool:
        """Whether the level differs noticeably from that of the last estimate."""
        if self.level is None or self.used is None:
            return self.level is not self.used
        return abs(self.level - self.used) > MIN_CHANGE

    def add(self, value: float, count: int = 1) -> None:
        """Adds a pass, or one that counts as several."""
        self.recent.extend([value] * count)
        self.weight = min(self.weight + count, float(self.recent.maxlen or 1))
        self.level = median(self.recent)


class LearnedCurve:
    """Seconds by nodes: linear between knots, and the last line continues for ever.

    reference: the cost by nodes; only ratios matter.
    stored: seconds at some of the knots that were measured or that another process has learned. They
      count as a few passes, and the first passes here say by which factor this process is faster or
      slower.
    """

    def __init__(
        self,
        reference: Mapping[int, float],
        config: AutoConfig,
        stored: Mapping[int, float],
    ) -> None:
        if not reference or min(reference) < 1 or min(reference.values()) <= 0:
            raise ValueError("a cost curve needs positive seconds for numbers of nodes from 1 on")
        self._config = config
        self._sizes = sorted(reference)
        self._reference = _rising([float(reference[n]) for n in self._sizes])
        self._reference_line: list[float] = []
        self._line: list[float] = []
        self._knots = [_Knot(config) for _ in self._sizes]
        self._near = [
            [config.curve_reach ** abs(math.log2(one / other)) for other in self._sizes]
            for one in self._sizes
        ]
        self._initial: list[float] = []
        """The first values, if some of them were stored."""
        self._initial_line: list[float] = []
        self._scale = deque([0.0] * config.stored_weight, maxlen=config.short_window)
        """Recent passes against the first curve, as logarithms."""
        self._delay = 0
        """Passes since the last estimate."""
        self._smallest = len(self._sizes)
        """The place of the smallest knot that a pass was seen of."""
        kept = [size for size in self._sizes if size in stored]
        rising = dict(zip(kept, _rising([float(stored[size]) for size in kept]), strict=True))
        for knot, size, base in zip(self._knots, self._sizes, self._reference, strict=True):
            if size in rising:
                knot.level = knot.stored = math.log(rising[size] / base)
                knot.weight = float(config.stored_weight)
        self.values = self._estimate()
        """Seconds at the knots."""
        if stored:
            self._initial = self.values

    @property
    def learned(self) -> bool:
        """Whether anything is known beyond the reference."""
        return any(knot.level is not None for knot in self._knots)

    @property
    def reference(self) -> dict[int, float]:
        """The curve that passes are compared with."""
        return dict(zip(self._sizes, self._reference, strict=True))

    @property
    def knots(self) -> dict[int, float]:
        """The current curve."""
        return dict(zip(self._sizes, self.values, strict=True))

    def known_knots(self) -> dict[int, float]:
        """Those knots of the current curve whose passes were seen, here or by another process."""
        return {
            size: value
            for size, value, knot in zip(self._sizes, self.values, self._knots, strict=True)
            if knot.level is not None
        }

    def seconds(self, nodes: int) -> list[float]:
        """Seconds for 0 to `nodes` nodes, and perhaps more; more nodes never cost less."""
        if len(self._line) <= nodes:
            self._line = self._interpolate(self.values, max(nodes, 1))
        return self._line

    def needs_passes(self, nodes: int) -> bool:
        """Whether few passes of this size were seen, so that every one of them counts."""
        knot = self._knots[self._nearest(nodes)]
        return len(knot.recent) < self._config.short_window

    def observe(self, nodes: int, seconds: float) -> None:
        """Learns from a pass over `nodes` nodes."""
        config, place = self._config, self._nearest(nodes)
        value, knot = math.log(seconds / self._reference_at(nodes)), self._knots[place]
        for other in self._knots:
            other.weight *= config.curve_memory
        if knot.stored is not None and knot.level is not None:
            knot.weight, knot.stored = 0.0, None
            knot.add(knot.level, config.stored_weight)
        knot.add(value)
        knot.long.append(value)
        if self._initial:
            if len(self._initial_line) <= nodes:
                self._initial_line = self._interpolate(self._initial, nodes)
            self._scale.append(math.log(seconds / self._initial_line[nodes]))
            self._smallest = min(self._smallest, place)
            scale = median(self._scale)
            for at, other in enumerate(self._knots):
                if other.stored is not None and (scale < 0.0 or at > self._smallest):
                    other.level = other.stored + scale
        self._delay += 1
        if self._delay >= MAX_DELAY or any(knot.moved for knot in self._knots):
            self.values, self._line = self._estimate(), []

    def usual_factor(self, nodes: int) -> float:
        """The cost of a long time against the current one, which recent passes may have pushed up."""
        long = self._knots[self._nearest(nodes)].long
        if len(long) < self._config.short_window:
            return 1.0
        now = math.log(self.seconds(nodes)[nodes] / self._reference_at(nodes))
        return math.exp(min(median(long) - now, 0.0))

    # --- the estimate -------------------------------------------------------------------------------

    def _estimate(self) -> list[float]:
        """Seconds at the knots: what each has seen, and what others say where that is little."""
        borrowed_weight = self._config.borrowed_weight
        found, weights = [], []
        self._delay = 0
        for place, (knot, base) in enumerate(zip(self._knots, self._reference, strict=True)):
            own_weight = knot.weight * knot.weight  # a dozen passes leave nothing to others
            weights.append(own_weight + borrowed_weight)
            value = borrowed_weight * self._borrowed(place)
            knot.used = knot.level
            if knot.level is not None:
                value += own_weight * knot.level
            found.append(base * math.exp(value / weights[-1]))
        return _rising(found, weights)

    def _borrowed(self, place: int) -> float:
        """What the other knots say about a knot: a mean in which near and recent ones count most."""
        own, total, weights = self._knots[place].level, 0.0, 0.0
        for other, (knot, near) in enumerate(zip(self._knots, self._near[place], strict=True)):
            level = knot.level
            if level is None or other == place:
                continue
            if own is not None and other > place and level > own:
                continue
            total += knot.weight * near * level
            weights += knot.weight * near
        return total / weights if weights else own or 0.0

    def _nearest(self, nodes: int) -> int:
        """The place of the knot that passes over `nodes` nodes belong to."""
        sizes = self._sizes
        place = bisect_left(sizes, nodes)
        if place == len(sizes):
            return place - 1
        if place and nodes * nodes <= sizes[place - 1] * sizes[place]:
            return place - 1
        return place

    def _reference_at(self, nodes: int) -> float:
        if len(self._reference_line) <= nodes:
            self._reference_line = self._interpolate(self._reference, nodes)
        return self._reference_line[nodes]

    def _interpolate(self, values: list[float], nodes: int) -> list[float]:
        """Values for 0 to `nodes`: linear between knots; the last line continues and never falls."""
        knots = self._sizes
        found = [values[0]] * (knots[0] + 1)
        for (left, low), (right, high) in pairwise(zip(knots, values, strict=True)):
            slope = (high - low) / (right - left)
            found += [low + slope * (n - left) for n in range(left + 1, right + 1)]
        slope = 0.0
        if len(knots) > 1:
            slope = max((values[-1] - values[-2]) / (knots[-1] - knots[-2]), 0.0)
        found += [values[-1] + slope * (n - knots[-1]) for n in range(knots[-1] + 1, nodes + 1)]
        return found


def _rising(values: list[float], weights: list[float] | None = None) -> list[float]:
    """The nearest values that never fall: neighbours in the wrong order become their mean."""
    if all(map(le, values, values[1:])):
        return values
    groups: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights or [1.0] * len(values), strict=True):
        total, mass, count = weight * value, weight, 1
        while groups and groups[-1][0] / groups[-1][1] > total / mass:
            more, other_mass, members = groups.pop()
            total, mass, count = total + more, mass + other_mass, count + members
        groups.append((total, mass, count))
    return [total / mass for total, mass, count in groups for _ in range(count)]
