"""Medusa and Hydra heads on stored hidden states, with matrices in any backend's format.

They run on a handful of rows, so everything but the matrix products is numpy on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from outstride.core.graph import FloatArray, IntArray
from outstride.core.proposal import Scores
from outstride.ops.contract import HeadInput
from outstride.ops.weights import MedusaHeadWeights, MedusaWeights

M = TypeVar("M")
"""A matrix in a backend's own format."""
N = TypeVar("N", contravariant=True)


class MatrixProducts(Protocol[N]):
    """The products that a backend lends to draft heads which run on the host."""

    def times(self, x: FloatArray, matrix: N) -> FloatArray:
        """x @ matrix.T: [rows, in] to [rows, out]."""
        ...

    def highest(self, x: FloatArray, matrix: N, count: int) -> tuple[IntArray, FloatArray]:
        """The columns of the `count` highest results of each row, best first, and the results."""
        ...


@dataclass(frozen=True, slots=True)
class _Block(Generic[M]):
    norm: FloatArray | None
    up: M
    bias: FloatArray | None
    down: M | None


@dataclass(frozen=True, slots=True)
class _Head(Generic[M]):
    blocks: list[_Block[M]]
    norm: FloatArray | None
    lm_head: M


@dataclass(frozen=True, slots=True)
class PackedMedusa(Generic[M]):
    """Medusa heads with their matrices in a backend's format."""

    hidden_norm: FloatArray | None
    token_norm: FloatArray | None
    heads: list[_Head[M]]
    vocabulary: IntArray
    """[tokens]"""
    eps: float

    @classmethod
    def pack(
        cls, weights: MedusaWeights, eps: float, pack: Callable[[torch.Tensor], M], shared: M
    ) -> PackedMedusa[M]:
        """From float32. shared: rows of the model's LM head, for heads without their own."""

        def packed(head: MedusaHeadWeights) -> _Head[M]:
            blocks = [
                _Block(
                    _array(block.norm),
                    pack(block.up),
                    _array(block.bias),
                    None if block.down is None else pack(block.down),
                )
                for block in head.blocks
            ]
            lm_head = shared if head.lm_head is None else pack(head.lm_head)
            return _Head(blocks, _array(head.norm), lm_head)

        return cls(
            _array(weights.hidden_norm),
            _array(weights.token_norm),
            [packed(head) for head in weights.heads],
            np.asarray(weights.vocabulary, dtype=np.int64),
            eps,
        )

    def candidates(
        self,
        item: HeadInput,
        gemm: MatrixProducts[M],
        embed: Callable[[IntArray], FloatArray],
    ) -> Scores:
        """The top-k tokens after each node, by the head of its depth, and their logits.

        embed: rows of the model's embedding, [tokens, hidden].
        """
        graph, nodes, wants = item.proposal.graph, item.nodes, item.proposal.wants
        depths = graph.positions[nodes] - graph.positions[0]
        x = np.array(item.hidden[nodes - item.first], dtype=np.float32)
        if self.hidden_norm is not None:
            # Heads that read tokens go on from states of their own, which have no such norm.
            of_model = depths == 0 if self.token_norm is not None else depths >= 0
            x[of_model] = self._normed(x[of_model], self.hidden_norm)
        tokens = None
        if self.token_norm is not None:
            tokens = self._normed(embed(graph.tokens[nodes]), self.token_norm)
        count = min(wants.best, len(self.vocabulary))
        best = np.empty((len(nodes), count), dtype=np.int64)
        values = np.empty((len(nodes), count), dtype=np.float32)
        for depth in np.unique(depths).tolist():
            rows, head = np.flatnonzero(depths == depth), self.heads[depth]
            x[rows] = self._through(head, x[rows], None if tokens is None else tokens[rows], gemm)
            hidden = x[rows] if head.norm is None else self._normed(x[rows], head.norm)
            places, values[rows] = gemm.highest(hidden, head.lm_head, count)
            best[rows] = self.vocabulary[places]
        return Scores(nodes, best, values=values, hidden={0: x} if wants.hidden else {})

    def _through(
        self, head: _Head[M], x: FloatArray, tokens: FloatArray | None, gemm: MatrixProducts[M]
    ) -> FloatArray:
        """x [rows, hidden] after the residual blocks of a head."""
        for i, block in enumerate(head.blocks):
            y = x if block.norm is None else self._normed(x, block.norm)
            if i == 0 and tokens is not None:
                y = np.concatenate([y, tokens], axis=1)
            inner = gemm.times(y, block.up)
            if block.bias is not None:
                inner = inner + block.bias
            powers = np.exp(np.minimum(-inner, np.float32(80.0)))
            inner = np.divide(inner, powers + np.float32(1.0), dtype=np.float32)
            x = x + (inner if block.down is None else gemm.times(inner, block.down))
        return x

    def _normed(self, x: FloatArray, weight: FloatArray) -> FloatArray:
        scale = np.sqrt(np.square(x).mean(axis=1, keepdims=True) + np.float32(self.eps))
        normed: FloatArray = x / scale * weight
        return normed


def _array(value: torch.Tensor | None) -> FloatArray | None:
    return None if value is None else np.asarray(value.numpy(), dtype=np.float32)
