"""The embedding of the CPU backend: packed rows of the vocabulary, and rows added after it."""

from __future__ import annotations

import numpy as np
import torch

from outstride.core.graph import FloatArray, IntArray
from outstride.ops.contract import Span
from outstride.ops.cpu.runtime import Runtime


class PackedEmbedding:
    """Rows of the embedding as float32, as wide as the kernels want hidden states to be."""

    def __init__(self, runtime: Runtime) -> None:
        self._table = runtime.weights.embedding
        self._size, self._width = runtime.shape.hidden_size, runtime.width
        self._vocab_size = runtime.shape.vocab_size
        self._added = np.zeros((0, self._size), dtype=np.float32)

    def add_rows(self, rows: torch.Tensor) -> int:
        """Adds rows [rows, hidden]; returns how many had been added before."""
        before = len(self._added)
        self._added = np.concatenate([self._added, rows.numpy().astype(np.float32)])
        return before

    def narrow_rows(self, tokens: IntArray) -> FloatArray:
        """[tokens, hidden]"""
        return self.rows(tokens)[:, : self._size]

    def rows(self, tokens: IntArray, out: FloatArray | None = None) -> FloatArray:
        """[tokens, width], written to `out` if it is given: an array of zeros."""
        size, listed = self._vocab_size, tokens.tolist()
        if not listed or max(listed) < size:
            return self._table.rows(tokens, self._width, out)
        if out is None:
            out = np.zeros((len(listed), self._width), dtype=np.float32)
        known = [i for i, token in enumerate(listed) if token < size]
        for i in known:
            self._table.rows(tokens[i : i + 1], self._width, out[i : i + 1])
        beyond = tokens >= size if known else slice(None)
        if known == list(range(len(known))):  # most often masks follow the known tokens
            beyond = slice(len(known), None)
        out[beyond, : self._size] = self._added[tokens[beyond] - size]
        return out

    def of_span(self, span: Span) -> FloatArray:
        """[computed nodes, width]: the inputs of a span; a mixture is summed in its own order."""
        graph, first = span.graph, span.first
        found = self.rows(np.maximum(graph.tokens[first:], 0))
        for node, mixture in graph.mixtures.items():
            if node >= first:
                total = np.zeros(self._width, dtype=np.float32)
                rows = self.rows(np.asarray(mixture.tokens, dtype=np.int64))
                for row, weight in zip(rows, mixture.weights, strict=True):
                    total += row * np.float32(weight)
                found[node - first] = total
        return found
