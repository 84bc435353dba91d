"""What a step costs: its pass by the number of nodes, drafts, and prefill chunks. All of it is learned.

The nodes of prefill chunks are counted apart. Each of them attends to everything that is cached before
it, so a chunk of the same size costs more the further a prompt has been processed.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TypeAlias

from outstride.policy.config import DEFAULT_CONFIG, AutoConfig
from outstride.policy.learned_curve import LearnedCurve

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

    def scale(self, factor: float) -> None:
        """Makes all chunks cost `factor` times as much."""
        self.per_node *= factor
        self.per_pair *= factor
        self.per_cached *= factor
        self.flat *= factor
        self._undisturbed = tuple(factor * term for term in self._undisturbed)

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

    Before there are a few of them, `prior` counts, in passes over one node. While there are none, the
    long-term usual value comes back step by step, so that a slow phase of the machine does not decide
    for good.
    """

    def __init__(self, prior: float, config: AutoConfig) -> None:
        self._prior = prior
        self._recent: deque[float] = deque(maxlen=config.short_window)
        self._long: deque[float] = deque(maxlen=config.long_window)
        self._usual: float | None = None
        self._config = config
        self._idle_steps = 0

    def seconds(self, plain: float) -> float:
        """Seconds, where a pass over one node takes `plain` seconds."""
        return self._prior * plain if self._usual is None else self._usual

    def observe(self, seconds: float) -> None:
        self._recent.append(seconds)
        self._long.append(seconds)
        self._idle_steps = 0
        if len(self._long) >= self._config.min_timed_drafts:
            self._usual = median(self._recent)

    def observe_idle(self) -> None:
        """Counts one more step without such a draft."""
        self._idle_steps += 1
        if self._usual is not None and self._idle_steps % self._config.draft_cost_recovery == 0:
            self._recent.append(sorted(self._long)[len(self._long) // 4])
            self._usual = median(self._recent)


class CostModel:
    """What steps cost: passes by nodes, drafts by their source, and prefill chunks.

    seconds: of a pass by nodes.
    stored: seconds that another process has learned; then, and if it is empty, only the ratios of
      `seconds` matter.
    frozen: whether nothing is learned, so that the same drafts are made on every machine.
    drafts: seconds of drafts that another process has learned, in passes over one node.
    """

    def __init__(
        self,
        seconds: Mapping[int, float],
        *,
        frozen: bool = False,
        config: AutoConfig = DEFAULT_CONFIG,
        stored: Mapping[int, float] | None = None,
        drafts: Mapping[DraftSource, float] | None = None,
    ) -> None:
        self.frozen = frozen
        self._config = config
        self._curve = LearnedCurve(seconds, config, seconds if stored is None else stored)
        (first, one), *_, (last, many) = (*self.knots.items(), *self.knots.items())
        node = (many - one) / max(last - first, 1)
        self.prefill = PrefillCost(max(node, 0.01 * one), config=config)
        """What prefill chunks cost next to decoding requests."""
        self.prefill_follows = False
        """Whether the cost of prefill chunks is known only in relation to the curve."""
        self._mean_context = float(config.profiling_context)
        """Mean number of cached tokens of sequences in the last passes."""
        self._step_seconds: deque[float] = deque(maxlen=config.long_window)
        """What recent steps took, without prefill chunks."""
        priors = {
            DraftSource.LOOKUP: config.lookup_cost_prior,
            DraftSource.HEAD: config.head_cost_prior,
            DraftSource.OVERLAPPED_HEAD: config.overlapped_head_cost_prior,
        } | dict(drafts or {})
        self._drafts = {source: _DraftSeconds(prior, config) for source, prior in priors.items()}

    @property
    def usual_step(self) -> float:
        """Seconds of a usual step, drafts included and prefill excluded; 0 while unknown."""
        known = len(self._step_seconds) >= self._config.short_window
        return median(self._step_seconds) if known else 0.0

    # --- drafts -------------------------------------------------------------------------------------

    def draft_seconds(self, count: int, source: DraftSource) -> float:
        """Seconds by which a step takes longer while drafts are made for `count` sequences."""
        return self._drafts[source].seconds(self.curve(1)[1]) * self._sequences_factor(count)

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

    def draft_shares(self) -> dict[DraftSource, float]:
        """Seconds of drafts for one sequence by source, in passes over one node."""
        plain = self.curve(1)[1]
        return {source: drafts.seconds(plain) / plain for source, drafts in self._drafts.items()}

    # --- passes -------------------------------------------------------------------------------------

    @property
    def reference(self) -> dict[int, float]:
        """The curve that passes are compared with."""
        return self._curve.reference

    @property
    def knots(self) -> dict[int, float]:
        """The current curve."""
        return self._curve.knots

    def known_knots(self) -> dict[int, float]:
        """Those knots of the current curve whose passes were seen, here or by another process."""
        return self._curve.known_knots()

    def curve(self, nodes: int) -> list[float]:
        """Seconds for 0 to `nodes` nodes, and perhaps more; more nodes never cost less."""
        return self._curve.seconds(nodes)

    def needs_plain_passes(self) -> bool:
        """Whether few passes over one node were seen, so that every one of them counts."""
        return not self.frozen and self._curve.needs_passes(1)

    def decode_seconds(self, parts: Parts) -> float:
        """Seconds of a pass over decoding sequences: more, the longer their contexts are."""
        nodes = sum(size for size, _ in parts)
        per_pair, per_cached = self.prefill.per_pair, self.prefill.per_cached
        longer = sum(
            (per_pair * size + per_cached) * (cached - self._mean_context) for size, cached in parts
        )
        usual = self.curve(nodes)[nodes]
        return self._curve.usual_factor(nodes) * max(usual + longer, 0.5 * usual)

    def observe(self, nodes: int, seconds: float, chunks: Parts = (), decoding: Parts = ()) -> None:
        """Learns from a step of `nodes` nodes; a single step says little, for it may be held up.

        If there are prefill chunks among its nodes, only the prefill cost learns, from what they add to
        the decoding parts: that later chunks cost more does not mean that the curve is wrong.
        """
        if self.frozen or nodes < 1 or seconds <= 0.0:
            return
        if chunks:
            if decoding:
                self._observe_prefill(seconds, chunks, decoding)
            return
        if decoding:
            context = sum(cached for _, cached in decoding) / len(decoding)
            self._mean_context += self._config.context_rate * (context - self._mean_context)
        self._step_seconds.append(seconds)
        self._observe_pass(nodes, seconds)

    def set_prefill(self, prefill: PrefillCost, *, follows: bool = False) -> None:
        """Sets the cost of prefill chunks.

        follows: whether it is known only in relation to the curve. Then it follows the curve until a
        chunk is timed.
        """
        self.prefill, self.prefill_follows = prefill, follows

    def _observe_pass(self, nodes: int, seconds: float) -> None:
        before = self.curve(1)[1]
        self._curve.observe(nodes, seconds)
        if self.prefill_follows:
            self.prefill.scale(self.curve(1)[1] / before)

    def _observe_prefill(self, seconds: float, chunks: Parts, decoding: Parts) -> None:
        """Learns from a step with prefill chunks next to decoding sequences."""
        prefill, decode = (
            sum(self.prefill.seconds(*chunk) for chunk in chunks),
            self.decode_seconds(decoding),
        )
        if not self._curve.learned:  # the first pass of all gives both their scale
            share = decode / (decode + prefill)
            self._observe_pass(sum(size for size, _ in decoding), share * seconds)
            return
        self._step_seconds.append(max(seconds - prefill, 0.0))
        self.prefill_follows = False
        self.prefill.observe(chunks, seconds - decode)


def whole_tiles(others: int, nodes: int, config: AutoConfig = DEFAULT_CONFIG) -> int:
    """How many of `nodes` nodes to add to `others`, so that no kernel tile is begun for a few."""
    tile = config.tile_rows
    whole = (others + nodes) // tile * tile - others
    return whole if whole >= config.min_tile_share * nodes else nodes
