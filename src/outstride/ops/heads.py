"""Trained heads on stored states: what they compute, in whatever form matrices are kept.

They guess and no more, on a handful of rows, so everything but the products is done on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from outstride.core.graph import FloatArray, IntArray
from outstride.core.proposal import Scores
from outstride.ops.contract import HeadsWeights, Wanted

M = TypeVar("M")
"""A matrix in an implementation's own format."""
N = TypeVar("N", contravariant=True)


class Products(Protocol[N]):
    """What an implementation lends to heads."""

    def embed(self, tokens: IntArray) -> FloatArray:
        """Rows of the embedding."""
        ...

    def times(self, x: FloatArray, matrix: N) -> FloatArray:
        """x @ matrix.T"""
        ...

    def highest(self, x: FloatArray, matrix: N, count: int) -> tuple[IntArray, FloatArray]:
        """The places of the highest results of each row, best first, and the results."""
        ...


@dataclass(frozen=True, slots=True)
class _Block(Generic[M]):
    norm: FloatArray | None
    enter: M
    bias: FloatArray | None
    leave: M | None


@dataclass(frozen=True, slots=True)
class _Head(Generic[M]):
    blocks: list[_Block[M]]
    norm: FloatArray | None
    vocabulary: M


@dataclass(frozen=True, slots=True)
class Heads(Generic[M]):
    """Trained heads, packed."""

    entry: FloatArray | None
    token: FloatArray | None
    heads: list[_Head[M]]
    vocabulary: IntArray
    eps: float

    @classmethod
    def pack(
        cls, weights: HeadsWeights, eps: float, pack: Callable[[torch.Tensor], M], shared: M
    ) -> Heads[M]:
        """From float32. shared: the rows of the model's head, for heads without a matrix."""
        heads = [
            _Head(
                [
                    _Block(
                        _array(block.norm),
                        pack(block.enter),
                        _array(block.bias),
                        None if block.leave is None else pack(block.leave),
                    )
                    for block in head.blocks
                ],
                _array(head.norm),
                shared if head.vocabulary is None else pack(head.vocabulary),
            )
            for head in weights.heads
        ]
        listed = np.asarray(weights.vocabulary, dtype=np.int64)
        return cls(_array(weights.entry), _array(weights.token), heads, listed, eps)

    def guesses(self, item: Wanted, by: Products[M]) -> Scores:
        """The likeliest tokens behind each node, by the head of its depth, and their logits."""
        graph, nodes, wants = item.proposal.graph, item.nodes, item.proposal.wants
        depths = graph.positions[nodes] - graph.positions[0]
        x = np.array(item.state[nodes - item.first], dtype=np.float32)
        if self.entry is not None:
            fresh = depths == 0 if self.token is not None else depths >= 0
            x[fresh] = self._normed(x[fresh], self.entry)
        tokens = None
        if self.token is not None:
            tokens = self._normed(by.embed(graph.tokens[nodes]), self.token)
        count = min(wants.best, len(self.vocabulary))
        best = np.empty((len(nodes), count), dtype=np.int64)
        values = np.empty((len(nodes), count), dtype=np.float32)
        for depth in np.unique(depths).tolist():
            rows, head = np.flatnonzero(depths == depth), self.heads[depth]
            x[rows] = self._through(head, x[rows], None if tokens is None else tokens[rows], by)
            state = x[rows] if head.norm is None else self._normed(x[rows], head.norm)
            places, values[rows] = by.highest(state, head.vocabulary, count)
            best[rows] = self.vocabulary[places]
        return Scores(nodes, best, values=values, hidden={0: x} if wants.hidden else {})

    def _through(
        self, head: _Head[M], x: FloatArray, tokens: FloatArray | None, by: Products[M]
    ) -> FloatArray:
        for i, block in enumerate(head.blocks):
            y = x if block.norm is None else self._normed(x, block.norm)
            if i == 0 and tokens is not None:
                y = np.concatenate([y, tokens], axis=1)
            inner = by.times(y, block.enter)
            if block.bias is not None:
                inner = inner + block.bias
            powers = np.exp(np.minimum(-inner, np.float32(80.0)))
            inner = np.divide(inner, powers + np.float32(1.0), dtype=np.float32)
            x = x + (inner if block.leave is None else by.times(inner, block.leave))
        return x

    def _normed(self, x: FloatArray, weight: FloatArray) -> FloatArray:
        scale = np.sqrt(np.square(x).mean(axis=1, keepdims=True) + np.float32(self.eps))
        normed: FloatArray = x / scale * weight
        return normed


def _array(value: torch.Tensor | None) -> FloatArray | None:
    return None if value is None else np.asarray(value.numpy(), dtype=np.float32)
