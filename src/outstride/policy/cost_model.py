"""Seconds of a step by the number of nodes in its pass: measured at the start, corrected on line.

The nodes of prefill chunks are counted apart. Each of them attends to everything that is cached before
it, so a chunk of the same size costs more the further a prompt has been processed.
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

from outstride.policy.config import DEFAULT_CONFIG, AutoConfig

Parts: TypeAlias = Sequence[tuple[int, int]]
"""Parts of a pass, one of each sequence: how many nodes, after how many cached tokens."""


class PrefillCost:
    """Seconds by which a pass takes longer because of the prefill chunks in it.

    A chunk costs `per_node` for each of its nodes, `per_pair` for each cached token that a node attends
    to, and `per_cached` for each cached token whose KV is loaded at all. After each step, the terms
    that make up most of the expected cost are corrected most. Where a pass costs about the same
    whatever its size, `flat` is what it takes; such a pass says nothing about nodes.

    `undisturbed` is the cost while nothing else holds up the machine. It falls with the current cost at
    once and rises slowly. The size of the next chunk follows the current cost; how much slower passes
    may get until a prompt is done follows the undisturbed one. Otherwise decoding requests would wait
    twice as long on a machine that is slow for a while.
    """

    def __init__(
        self,
        per_node: float,
        per_pair: float = 0.0,
        per_cached: float = 0.0,
        *,
        flat: float = 0.0,
        config: AutoConfig = DEFAULT_CONFIG,
    ) -> None:
        self.per_node, self.per_pair, self.per_cached = per_node, per_pair, per_cached
        self.flat = flat
        self._config = config
        self._undisturbed: tuple[float, ...] = per_node, per_pair, per_cached

    @property
    def undisturbed(self) -> PrefillCost:
        """The cost while nothing else holds up the machine."""
        return PrefillCost(*self._undisturbed, flat=self.flat, config=self._config)

    def seconds(self, nodes: int, cached: int) -> float:
        """Seconds that a chunk of `nodes` nodes adds after `cached` cached tokens."""
        return sum(self._terms(nodes, cached)) if nodes else 0.0

    def _terms(self, nodes: int, cached: int) -> tuple[float, float, float]:
        pairs = nodes * (cached + 0.5 * nodes)
        return self.per_node * nodes, self.per_pair * pairs, self.per_cached * cached

    def max_nodes(self, seconds: float, cached: int) -> int:
        """The largest chunk that adds no more than `seconds` after `cached` cached tokens."""
        left = seconds - self.per_cached * cached
        each, bend = self.per_node + self.per_pair * cached, self.per_pair
        if left <= 0.0:
            return 0
        return int(2.0 * left / (each + math.sqrt(each * each + 2.0 * bend * left)))

    def observe(self, chunks: Parts, seconds: float) -> None:
        """Learns from a pass that took `seconds` longer because of these chunks."""
        if self.flat:
            return
        config = self._config
        terms = zip(*(self._terms(*chunk) for chunk in chunks), strict=True)
        node, pair, cached = map(sum, terms)
        expected = node + pair + cached
        ratio = min(max(seconds / expected, 1.0 / config.max_correction), config.max_correction)
        rate = config.prefill_rise_rate if ratio > 1.0 else config.prefill_fall_rate
        self.per_node *= ratio ** (rate * node / expected)
        self.per_pair *= ratio ** (rate * pair / expected)
        self.per_cached *= ratio ** (rate * cached / expected)
        growth = config.prefill_undisturbed_growth
        risen = (growth * term for term in self._undisturbed)
        current = self.per_node, self.per_pair, self.per_cached
        self._undisturbed = tuple(map(min, current, risen))


class DraftSource(enum.Enum):
    """How drafts are made; each way has a cost of its own."""

    LOOKUP = "lookup"
    """Looked up in text or tables."""
    HEAD = "head"
    """By a draft head."""
    OVERLAPPED_HEAD = "overlapped head"
    """By a draft head for a single sequence, where the target's pass over the chain is under way
    before the host knows the chain."""

    @classmethod
    def of(cls, num_asking: int, *, overlapped: bool) -> DraftSource:
        """The way of a step in which `num_asking` sequences use draft heads."""
        return cls.OVERLAPPED_HEAD if overlapped else cls.HEAD if num_asking else cls.LOOKUP


class _DraftSeconds:
    """Seconds by which drafts make a step longer: the median of the last steps that had some.

    While there are none, the long-term usual value comes back step by step, so that a slow phase of
    the machine does not decide for good.
    """

    def __init__(self, first: float, config: AutoConfig) -> None:
        self.seconds = first
        self._recent = deque([first], maxlen=config.short_window)
        self._long = deque([first], maxlen=config.long_window)
        self._recovery = config.draft_cost_recovery
        self._idle_steps = 0

    def observe(self, seconds: float) -> None:
        self._recent.append(seconds)
        self._long.append(seconds)
        self.seconds, self._idle_steps = median(self._recent), 0

    def observe_idle(self) -> None:
        """Counts one more step without such a draft."""
        self._idle_steps += 1
        if self._idle_steps % self._recovery == 0:
            self._recent.append(sorted(self._long)[len(self._long) // 4])
            self.seconds = median(self._recent)


class CostModel:
    """Seconds of a step by nodes: linear between knots, and the last line continues for ever.

    After each step the knots near its size follow what it took, those further away by less. Other work
    on the machine may slow down passes over several nodes, which compute, and hardly passes over one
    node, which wait for memory. A sequence that always drafts therefore learns nothing about plain
    passes; if everything became slower, that shows as soon as a plain pass is run. A frozen model,
    whose curve was given and not measured, never changes.
    """

    def __init__(
        self,
        seconds: Mapping[int, float],
        *,
        frozen: bool = False,
        config: AutoConfig = DEFAULT_CONFIG,
    ) -> None:
        if not seconds or min(seconds) < 1 or min(seconds.values()) <= 0:
            raise ValueError("a cost curve needs positive seconds for numbers of nodes from 1 on")
        self.frozen = frozen
        self._config = config
        self._knots = sorted(seconds)
        self._values = _rising([float(seconds[n]) for n in self._knots])
        self._curve: list[float] = []
        node = (self._values[-1] - self._values[0]) / max(self._knots[-1] - self._knots[0], 1)
        self.prefill = PrefillCost(max(node, 0.01 * self._values[0]), config=config)
        """What prefill chunks cost next to decoding requests."""
        self._mean_context = float(config.profiling_context)
        """Mean number of cached tokens of sequences when the curve was last corrected."""
        self._initial = list(self._values)
        self._initial_curve: list[float] = []
        self._rates: dict[int, list[float]] = {}
        self._drifts: deque[float] = deque(maxlen=config.long_window)
        """What recent steps took against the initial curve: logarithms."""
        self._step_seconds: deque[float] = deque(maxlen=config.long_window)
        """What they took, without prefill chunks."""
        priors = (
            config.lookup_cost_prior,
            config.head_cost_prior,
            config.overlapped_head_cost_prior,
        )
        self._drafts = {
            source: _DraftSeconds(prior * self._values[0], config)
            for source, prior in zip(DraftSource, priors, strict=True)
        }

    @property
    def usual_step(self) -> float:
        """Seconds of a usual step, drafts included and prefill excluded; 0 while unknown."""
        known = len(self._step_seconds) >= self._config.short_window
        return median(self._step_seconds) if known else 0.0

    def draft_seconds(self, count: int, source: DraftSource) -> float:
        """Seconds by which a step takes longer while drafts are made for `count` sequences."""
        return self._drafts[source].seconds * self._sequences_factor(count)

    def observe_drafting(self, count: int, seconds: float, source: DraftSource) -> None:
        """Learns by how much a step took longer while drafts were made for `count` sequences.

        That may be negative where the curve was measured without overlap.
        """
        if not self.frozen:
            self._drafts[source].observe(seconds / self._sequences_factor(count))

    def _sequences_factor(self, count: int) -> float:
        """The cost of drafts for `count` sequences against the cost of a draft for one."""
        return 1.0 + self._config.extra_sequence_share * (count - 1)

    def observe_no_head(self) -> None:
        """Counts a step in which no draft head was used."""
        if not self.frozen:
            self._drafts[DraftSource.HEAD].observe_idle()
            self._drafts[DraftSource.OVERLAPPED_HEAD].observe_idle()

    @property
    def knots(self) -> dict[int, float]:
        """The current curve."""
        return dict(zip(self._knots, self._values, strict=True))

    def curve(self, nodes: int) -> list[float]:
        """Seconds for 0 to `nodes` nodes, and perhaps more; more nodes never cost less."""
        if len(self._curve) <= nodes:
            self._curve = _interpolated(self._knots, self._values, max(nodes, 1))
        return self._curve

    def decode_seconds(self, parts: Parts) -> float:
        """Seconds of a pass over decoding sequences: more, the longer their contexts are."""
        nodes = sum(size for size, _ in parts)
        per_pair, per_cached = self.prefill.per_pair, self.prefill.per_cached
        longer = sum(
            (per_pair * size + per_cached) * (cached - self._mean_context) for size, cached in parts
        )
        usual = self.curve(nodes)[nodes]
        return self._undisturbed_factor(nodes) * max(usual + longer, 0.5 * usual)

    def _undisturbed_factor(self, nodes: int) -> float:
        """The usual cost against the curve, which the last few steps may have pushed up."""
        if len(self._drifts) < self._config.short_window:
            return 1.0
        return math.exp(min(median(self._drifts) - self._drift(nodes), 0.0))

    def _drift(self, nodes: int) -> float:
        """How far the curve has moved since the start, at this number of nodes: a logarithm."""
        nodes = min(nodes, self._knots[-1])
        if len(self._initial_curve) <= nodes:
            self._initial_curve = _interpolated(self._knots, self._initial, nodes)
        return math.log(self.curve(nodes)[nodes] / self._initial_curve[nodes])

    def observe(self, nodes: int, seconds: float, chunks: Parts = (), decoding: Parts = ()) -> None:
        """Learns from a step of `nodes` nodes; a single step says little, for it may be held up.

        If there are prefill chunks among its nodes, only the prefill cost learns, from what they add to
        the decoding parts: that later chunks cost more does not mean that the curve is wrong.
        """
        if self.frozen or nodes < 1 or seconds <= 0.0:
            return
        if chunks:
            if decoding:
                prefill = sum(self.prefill.seconds(*chunk) for chunk in chunks)
                self._step_seconds.append(max(seconds - prefill, 0.0))
                self.prefill.observe(chunks, seconds - self.decode_seconds(decoding))
            return
        config = self._config
        if decoding:
            context = sum(cached for _, cached in decoding) / len(decoding)
            self._mean_context += config.curve_rate * (context - self._mean_context)
        self._step_seconds.append(seconds)
        ratio = seconds / self.curve(nodes)[nodes]
        ratio = min(max(ratio, 1.0 / config.max_correction), config.max_correction)
        moved = math.log(ratio)
        self._drifts.append(self._drift(nodes) + moved)
        self._values = _rising(
            [
                value * math.exp(moved * rate)
                for rate, value in zip(self._knot_rates(nodes), self._values, strict=True)
            ]
        )
        self._curve = []

    def _knot_rates(self, nodes: int) -> list[float]:
        """How far each knot follows a step of `nodes` nodes."""
        nodes = min(nodes, self._knots[-1])
        if nodes not in self._rates:
            rate, reach = self._config.curve_rate, self._config.curve_reach
            here = math.log2(nodes)
            self._rates[nodes] = [
                rate * reach ** abs(math.log2(knot) - here) for knot in self._knots
            ]
        return self._rates[nodes]


def _interpolated(knots: list[int], values: list[float], nodes: int) -> list[float]:
    """Values for 0 to `nodes`: linear between knots; the last line continues and never falls."""
    found = [values[0]] * (knots[0] + 1)
    for (left, low), (right, high) in pairwise(zip(knots, values, strict=True)):
        slope = (high - low) / (right - left)
        found += [low + slope * (n - left) for n in range(left + 1, right + 1)]
    slope = 0.0
    if len(knots) > 1:
        slope = max((values[-1] - values[-2]) / (knots[-1] - knots[-2]), 0.0)
    found += [values[-1] + slope * (n - knots[-1]) for n in range(knots[-1] + 1, nodes + 1)]
    return found


def whole_tiles(others: int, nodes: int, config: AutoConfig = DEFAULT_CONFIG) -> int:
    """How many of `nodes` nodes to add to `others`, so that no kernel tile is begun for a few."""
    tile = config.tile_rows
    whole = (others + nodes) // tile * tile - others
    return whole if whole >= config.min_tile_share * nodes else nodes


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
