"""Trained parts that go on from states, in the native format.

Their queries, keys and values are made on the host, from products in native code: a part has one such
layer and few rows. The rest of the layer runs like any other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from outstride.core.graph import FloatArray, IntArray
from outstride.errors import UnsupportedModel
from outstride.ops.contract import FollowWeights, GraftWeights, LayerWeights, Shape
from outstride.ops.cpu.packed import Packed, rounded
from outstride.ops.cpu.weights import Layer, Weights, pack_layer


class Products(Protocol):
    """What the operations lend to a part."""

    def embed(self, tokens: IntArray) -> FloatArray: ...
    def times(self, x: FloatArray, matrix: Packed) -> FloatArray: ...
    def highest(self, x: FloatArray, matrix: Packed, count: int) -> tuple[IntArray, FloatArray]: ...


def fitted(layer: LayerWeights, shape: Shape) -> LayerWeights:
    """A layer whose MLP is as wide as the model's, by channels that are zero."""
    lacking = shape.intermediate_size - layer.down.shape[1]
    if lacking < 0:
        raise UnsupportedModel(
            f"the MLP of this part is {layer.down.shape[1]} wide, more than the model's "
            f"{shape.intermediate_size}: it runs with --weights fp32"
        )
    if not lacking:
        return layer
    none = torch.zeros(lacking, layer.gate_up.shape[1])
    gate, up = layer.gate_up.chunk(2)
    return replace(
        layer,
        gate_up=torch.cat([gate, none, up, none]),
        down=torch.cat([layer.down, none.new_zeros(len(layer.down), lacking)], dim=1),
    )


@dataclass(slots=True)
class Follower:
    """A part with `follow`: how it makes the input of a node, its layer, and what it scores with."""

    weights: GraftWeights
    follow: FollowWeights
    shape: Shape
    first: int
    layers: list[Layer]
    depth: int
    """The widest rows that it multiplies."""
    mix: list[Packed]
    """For each of the states that it reads; none if they are taken as they are."""
    fuse: list[Packed]
    """For the embedding and for the state before."""
    qkv: Packed
    head: Packed
    vocabulary: IntArray
    inverse: FloatArray
    embedding: npt.NDArray[np.float16] | None
    carried: FloatArray
    """What it finds at each slot."""

    @classmethod
    def pack(
        cls, weights: GraftWeights, shape: Shape, first: int, own: Weights, slots: int
    ) -> Follower:
        """From float32, beside a model's own weights."""
        follow, [given] = weights.follow, weights.layers
        assert follow is not None
        size = shape.hidden_size
        plain = replace(given, qkv=given.qkv[:, :size], attention_norm=torch.ones(size))
        layer = pack_layer(shape, fitted(plain, shape), 8)
        layer.qkv = _packed(given.qkv)
        head, listed = own.vocabulary, np.asarray(weights.vocabulary, dtype=np.int64)
        if weights.head is not None:
            head = _packed(weights.head)
        elif len(listed) < shape.vocab_size:
            head = Packed.of(head.rows(listed, size), None, rounded(size, 32))
        table = follow.embedding
        widest = max(len(weights.taps), 2) * size
        return cls(
            weights=weights,
            follow=follow,
            shape=shape,
            first=first,
            layers=[layer],
            depth=rounded(widest, 32),
            mix=_apart(weights.mix, size),
            fuse=_apart(follow.fuse, size),
            qkv=layer.qkv,
            head=head,
            vocabulary=listed,
            inverse=np.asarray(weights.frequencies or shape.frequencies, dtype=np.float64),
            embedding=None if table is None else table.numpy().astype(np.float16),
            carried=np.zeros((slots, size), dtype=np.float32),
        )

    def digest(self, states: FloatArray, slots: IntArray, by: Products) -> None:
        """Keeps what the part makes of the model's states, side by side for each slot."""
        if self.weights.scale is not None:
            states = self._normed(states, self.weights.scale)
        self.carried[slots] = self._summed(states, self.mix, by) if self.mix else states

    def enter(
        self, tokens: IntArray, before: IntArray, by: Products
    ) -> tuple[FloatArray, FloatArray | None]:
        """The states with which nodes enter, and what the layer reads in front of them."""
        follow = self.follow
        x = np.where((before >= 0)[:, None], self.carried[np.maximum(before, 0)], np.float32(0))
        if self.embedding is None:
            words = by.embed(tokens)
        else:
            known = np.where(tokens < len(self.embedding), np.maximum(tokens, 0), 0)
            words = self.embedding[known].astype(np.float32)
        if self.fuse:
            x = self._summed(np.concatenate([words, x], axis=1), self.fuse, by)
            if follow.bias is not None:
                x = x + follow.bias.numpy()
        if follow.entry is not None:
            x = self._normed(x, follow.entry)
        return x, None if follow.beside is None else self._normed(words, follow.beside)

    def project(
        self,
        x: FloatArray,
        beside: FloatArray | None,
        positions: IntArray,
        by: Products,
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Queries, keys and values of all heads."""
        shape, [given] = self.shape, self.weights.layers
        if len(given.attention_norm):
            x = self._normed(x, given.attention_norm)
        if beside is not None:
            x = np.concatenate([beside, x], axis=1)
        qkv = by.times(x, self.qkv)
        if given.qkv_bias is not None:
            qkv = qkv + given.qkv_bias.numpy()
        heads = qkv.reshape(len(x), -1, shape.head_dim)
        q, k, v = np.split(heads, [shape.heads, shape.heads + shape.kv_heads], axis=1)
        if given.query_norm is not None and given.key_norm is not None:
            q, k = self._normed(q, given.query_norm), self._normed(k, given.key_norm)
        return self._turned(q, positions), self._turned(k, positions), v

    def carry(self, x: FloatArray, slots: IntArray) -> None:
        """Keeps the states that leave the part, for the nodes behind."""
        if self.follow.again and self.weights.norm is not None:
            x = self._normed(x, self.weights.norm)
        self.carried[slots] = x

    def guesses(self, x: FloatArray, count: int, by: Products) -> tuple[IntArray, FloatArray]:
        """The likeliest tokens of each row, and their logits."""
        if self.weights.norm is not None:
            x = self._normed(x, self.weights.norm)
        places, found = by.highest(x, self.head, count)
        return self.vocabulary[places], found

    def _summed(self, x: FloatArray, matrices: list[Packed], by: Products) -> FloatArray:
        """Rows that stand side by side times a matrix each."""
        first, *others = zip(np.split(x, len(matrices), axis=1), matrices, strict=True)
        total = by.times(*first)
        for part, matrix in others:
            total = total + by.times(part, matrix)
        return total

    def _normed(self, x: FloatArray, weight: torch.Tensor) -> FloatArray:
        mean = np.square(x).mean(axis=-1, keepdims=True)
        normed: FloatArray = x / np.sqrt(mean + np.float32(self.shape.norm_eps)) * weight.numpy()
        return normed

    def _turned(self, x: FloatArray, positions: IntArray) -> FloatArray:
        """The halves of each head against each other."""
        angles = np.outer(positions, self.inverse)[:, None]
        own = self.weights.frequencies is not None
        scale = self.weights.rope_scale if own else self.shape.rope_scale
        cos = (np.cos(angles) * scale).astype(np.float32)
        sin = (np.sin(angles) * scale).astype(np.float32)
        low, high = np.split(x, 2, axis=-1)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def _apart(matrix: torch.Tensor | None, size: int) -> list[Packed]:
    """A matrix for each `size` columns: rows of other sizes than their neighbours need own scales."""
    return [] if matrix is None else [_packed(part) for part in torch.split(matrix, size, dim=1)]


def _packed(matrix: torch.Tensor) -> Packed:
    return Packed.of(matrix.numpy(), None, rounded(matrix.shape[1], 32))
