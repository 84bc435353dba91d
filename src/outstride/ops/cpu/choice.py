"""From states to tokens: the vocabulary, and the choice from it."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence

import numpy as np

from outstride.core.graph import FloatArray, IntArray
from outstride.core.host import address
from outstride.core.proposal import Proposal, Scores
from outstride.core.select import select
from outstride.ops.contract import Wanted
from outstride.ops.cpu import native
from outstride.ops.cpu.products import Products
from outstride.ops.cpu.workspace import together

HEAD_ROWS = 64
"""So many rows of the vocabulary exist at once, however many nodes are wanted."""


class Choice(Products):
    """Scores of tokens: greedy ones never become rows of the vocabulary; others do, a few at a time."""

    _logits = np.empty(0, dtype=np.float32)
    """Room for rows of the vocabulary that nobody gets to keep: fresh memory is slow to come by."""
    _scaled = np.empty(0, dtype=np.float32)
    _room = np.empty(0, dtype=native.BEST)

    def _choose(
        self,
        way: Way,
        wanted: Sequence[Wanted],
        portion: list[tuple[int, IntArray]],
        results: list[list[Scores]],
    ) -> None:
        """Scores some rows and files what was found with their owners."""
        weights, size = self._weights, self._shape.hidden_size
        states = [states_of(wanted[i], nodes) for i, nodes in portion]
        x = states[0] if len(states) == 1 else np.concatenate(states)
        best, logits = np.zeros((0, 0), dtype=np.int64), self._logits
        if way is Way.GREEDY:
            most = max(wanted[i].proposal.wants.best for i, _ in portion)
            best, _ = self._highest(x, weights.norm, weights.vocabulary, size, most)
        else:
            keep = any(wanted[i].proposal.wants.logits for i, _ in portion)
            room = None if keep else self._rows_of_logits(len(x))
            logits = self._results(x, weights.norm, weights.vocabulary, size, room)
        if way is Way.DRAWN:
            asked = [(wanted[i].proposal, n) for i, nodes in portion for n in nodes.tolist()]
            best = self._drawn(asked, logits)
        start = 0
        for i, nodes in portion:
            rows, proposal = slice(start, start + len(nodes)), wanted[i].proposal
            start += len(nodes)
            if way is Way.HOST:
                found = select(proposal, nodes, logits[rows, : self._shape.vocab_size])
            else:
                found = Scores(nodes, best[rows, : max(1, proposal.wants.best)])
            results[i].append(found)

    def _rows_of_logits(self, count: int) -> FloatArray:
        """Room for so many rows of the vocabulary."""
        if self._logits.size < (needed := count * self._weights.vocabulary.stride):
            self._logits = np.empty(needed, dtype=np.float32)
        return self._logits

    def _drawn(self, asked: list[tuple[Proposal, int]], logits: FloatArray) -> IntArray:
        """The tokens of each row by the rule of core.sampling, in native code."""
        count, stride = logits.shape
        k = max(max(1, proposal.wants.best) for proposal, _ in asked)
        draws = np.zeros(count, dtype=native.DRAW)
        for line, (proposal, node) in zip(draws, asked, strict=True):
            draw = proposal.draw
            line["seed"], line["index"], line["purpose"] = draw.seed, draw.index, draw.purpose
            line["position"] = int(proposal.graph.positions[node]) + proposal.offset
            line["top_k"], line["top_p"] = draw.top_k, draw.top_p
            line["temperature"], line["min_p"] = draw.temperature, draw.min_p
            line["log_min_p"] = np.log(draw.min_p) if draw.min_p > 0 else 0.0
        if self._scaled.size < self._threads * stride:
            self._scaled = np.empty(self._threads * stride, dtype=np.float32)
            self._room = np.empty(self._threads * stride, dtype=native.BEST)
        out = np.empty((count, k), dtype=np.int32)
        self._lib.outstride_choose(
            self._engine,
            native.Choose(
                address(logits),
                address(draws),
                address(self._scaled),
                address(self._room),
                address(out),
                count,
                stride,
                self._shape.vocab_size,
                k,
            ),
        )
        return out.astype(np.int64)


def states_of(item: Wanted, nodes: IntArray) -> FloatArray:
    """The states of some nodes, without a copy where they stand below each other, as they mostly do."""
    found: FloatArray = item.state[together(nodes - item.first if item.first else nodes)]
    return found


def portions(parts: list[tuple[int, IntArray]], most: int) -> Iterator[list[tuple[int, IntArray]]]:
    """The same parts in portions of at most `most` nodes; a part may be cut."""
    portion: list[tuple[int, IntArray]] = []
    room = most
    for owner, nodes in parts:
        while len(nodes) > room:
            if room:
                portion.append((owner, nodes[:room]))
            yield portion
            nodes, portion, room = nodes[room:], [], most
        portion.append((owner, nodes))
        room -= len(nodes)
    if portion:
        yield portion


class Way(enum.Enum):
    """How a row's tokens are chosen."""

    GREEDY = enum.auto()
    DRAWN = enum.auto()
    HOST = enum.auto()


def way_of(item: Wanted) -> Way:
    """By what the request asks for, so that one request always goes one way."""
    proposal, wants = item.proposal, item.proposal.wants
    if proposal.rules or wants.logprobs is not None or wants.rows or wants.logits:
        return Way.HOST
    if proposal.draw.temperature == 0.0 and wants.best <= native.MOST_FUSED:
        return Way.GREEDY
    return Way.DRAWN if wants.best <= native.MOST_BEST else Way.HOST
