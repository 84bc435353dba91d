"""EAGLE heads in the native format.

The queries, keys and values of their layer are made in numpy, from native products: a head has one
layer and a pass has few rows. The rest of the layer runs in the kernels, like any other layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from outstride.core.graph import FloatArray, IntArray
from outstride.ops.cpu.draft_head_weights import pack_lm_head, with_padded_mlp
from outstride.ops.cpu.embedding import PackedEmbedding
from outstride.ops.cpu.gemm import Gemm
from outstride.ops.cpu.int8 import Int8Matrix, rounded
from outstride.ops.cpu.runtime import ExtraLayers, Runtime
from outstride.ops.cpu.weights import pack_layer
from outstride.ops.switches import RopeWeights
from outstride.ops.weights import SKIP_FIRST, EagleWeights, ModelShape


@dataclass(slots=True)
class PackedEagle:
    """An EAGLE head, its layer attached to the runtime."""

    weights: EagleWeights
    shape: ModelShape
    gemm: Gemm
    model_embedding: PackedEmbedding
    extra: ExtraLayers
    fusion: list[Int8Matrix]
    """[hidden, hidden] for each auxiliary layer; none if hidden states are taken as they are."""
    input_projection: list[Int8Matrix]
    """[hidden, hidden] for the embedding and for the hidden state before; none in EAGLE-3."""
    qkv: Int8Matrix
    lm_head: Int8Matrix
    vocabulary: IntArray
    """[tokens]"""
    frequencies: FloatArray
    """[head_dim / 2], in float64."""
    rope_scale: float
    embedding: npt.NDArray[np.float16] | None
    """[vocab_size, hidden]; None: the model's."""
    hidden: FloatArray
    """[slots, hidden]: what the node after each slot reads."""

    @classmethod
    def attach(
        cls, weights: EagleWeights, runtime: Runtime, gemm: Gemm, embedding: PackedEmbedding
    ) -> PackedEagle:
        """From float32."""
        shape, given = runtime.shape, weights.layer
        size = shape.hidden_size
        # The kernels run the layer from attention on; its norm and QKV are not theirs.
        plain = replace(given, qkv=given.qkv[:, :size], attention_norm=torch.ones(size))
        layer = pack_layer(shape, with_padded_mlp(plain, shape), 8)
        layer.qkv = qkv = _packed(given.qkv)
        lm_head = pack_lm_head(weights, runtime)
        fusion = _split(weights.fusion, size)
        input_projection = _split(weights.input_projection, size)
        rope = weights.rope or RopeWeights(tuple(shape.frequencies), shape.rope_scale)
        runtime.store_layers(weights.aux_layers)
        depth = rounded(max(len(weights.aux_layers), 2) * size, 32)
        return cls(
            weights=weights,
            shape=shape,
            gemm=gemm,
            model_embedding=embedding,
            extra=runtime.add_layers([layer], SKIP_FIRST, depth, None),
            fusion=fusion,
            input_projection=input_projection,
            qkv=qkv,
            lm_head=lm_head,
            vocabulary=np.asarray(weights.vocabulary, dtype=np.int64),
            frequencies=np.asarray(rope.frequencies, dtype=np.float64),
            rope_scale=rope.scale,
            embedding=None
            if weights.embedding is None
            else weights.embedding.numpy().astype(np.float16),
            hidden=np.zeros((runtime.slots, size), dtype=np.float32),
        )

    def fuse(self, features: FloatArray, slots: IntArray) -> None:
        """Keeps the fused hidden states of the model, from features [slots, A * hidden]."""
        if self.weights.aux_norm is not None:
            features = self._normed(features, self.weights.aux_norm)
        self.hidden[slots] = self._summed(features, self.fusion) if self.fusion else features

    def enter(self, tokens: IntArray, previous: IntArray) -> tuple[FloatArray, FloatArray | None]:
        """The inputs of nodes, [nodes, hidden], and the embeddings that EAGLE-3's QKV reads before
        them.

        previous: the slot of the node before each one; -1: there is none.
        """
        weights = self.weights
        known = np.maximum(previous, 0)
        x = np.where((previous >= 0)[:, None], self.hidden[known], np.float32(0))
        if self.embedding is None:
            embedded = self.model_embedding.narrow_rows(tokens)
        else:
            ids = np.where(tokens < len(self.embedding), np.maximum(tokens, 0), 0)
            embedded = self.embedding[ids].astype(np.float32)
        if self.input_projection:
            x = self._summed(np.concatenate([embedded, x], axis=1), self.input_projection)
            if weights.input_bias is not None:
                x = x + weights.input_bias.numpy()
        if weights.hidden_norm is not None:
            x = self._normed(x, weights.hidden_norm)
        if weights.embedding_norm is None:
            return x, None
        return x, self._normed(embedded, weights.embedding_norm)

    def project(
        self, x: FloatArray, embedded: FloatArray | None, positions: IntArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Queries, keys and values, [nodes, heads or kv_heads, head_dim], of inputs from `enter`."""
        shape, layer = self.shape, self.weights.layer
        if len(layer.attention_norm):
            x = self._normed(x, layer.attention_norm)
        if embedded is not None:
            x = np.concatenate([embedded, x], axis=1)
        qkv = self.gemm.times(x, self.qkv)
        if layer.qkv_bias is not None:
            qkv = qkv + layer.qkv_bias.numpy()
        heads = qkv.reshape(len(x), -1, shape.head_dim)
        q, k, v = np.split(heads, [shape.heads, shape.heads + shape.kv_heads], axis=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            q, k = self._normed(q, layer.query_norm), self._normed(k, layer.key_norm)
        return self._rotated(q, positions), self._rotated(k, positions), v

    def keep_hidden(self, x: FloatArray, slots: IntArray) -> None:
        """Keeps the hidden states that leave the layer, for the nodes after these."""
        if self.weights.feeds_back_normed and self.weights.norm is not None:
            x = self._normed(x, self.weights.norm)
        self.hidden[slots] = x

    def candidates(self, x: FloatArray, count: int) -> tuple[IntArray, FloatArray]:
        """The top-k tokens of each row of hidden states [rows, hidden], and their logits."""
        if self.weights.norm is not None:
            x = self._normed(x, self.weights.norm)
        places, logits = self.gemm.highest(x, self.lm_head, count)
        return self.vocabulary[places], logits

    def _summed(self, x: FloatArray, matrices: list[Int8Matrix]) -> FloatArray:
        """x [rows, n * hidden] times n matrices next to each other: the sum of n products."""
        first, *others = zip(np.split(x, len(matrices), axis=1), matrices, strict=True)
        total = self.gemm.times(*first)
        for part, matrix in others:
            total = total + self.gemm.times(part, matrix)
        return total

    def _normed(self, x: FloatArray, weight: torch.Tensor) -> FloatArray:
        mean = np.square(x).mean(axis=-1, keepdims=True)
        normed: FloatArray = x / np.sqrt(mean + np.float32(self.shape.norm_eps)) * weight.numpy()
        return normed

    def _rotated(self, x: FloatArray, positions: IntArray) -> FloatArray:
        """RoPE of x [nodes, heads, head_dim]."""
        angles = np.outer(positions, self.frequencies)[:, None]
        cos = (np.cos(angles) * self.rope_scale).astype(np.float32)
        sin = (np.sin(angles) * self.rope_scale).astype(np.float32)
        low, high = np.split(x, 2, axis=-1)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def _split(matrix: torch.Tensor | None, size: int) -> list[Int8Matrix]:
    """One matrix for each `size` columns: inputs of different magnitude need scales of their own."""
    return [] if matrix is None else [_packed(part) for part in torch.split(matrix, size, dim=1)]


def _packed(matrix: torch.Tensor) -> Int8Matrix:
    return Int8Matrix.of(matrix.numpy(), None, rounded(matrix.shape[1], 32))
