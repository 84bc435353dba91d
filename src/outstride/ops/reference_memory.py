"""What the reference backend keeps between passes: embedding rows, KV cache, stored hidden states."""

from __future__ import annotations

import math
import mmap

import numpy as np
import torch

from outstride.core.graph import IntArray
from outstride.ops.arithmetic import SPARE
from outstride.ops.contract import Span
from outstride.ops.weights import ModelShape, head_sizes


def zeros(*shape: int) -> torch.Tensor:
    """Zeros that take memory only once they are written, one small page at a time.

    numpy would ask for huge pages, and the first KV of each layer would cost megabytes.
    """
    if not (count := math.prod(shape)):
        return torch.zeros(shape)
    memory = mmap.mmap(-1, count * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.float32).view(shape)


class ReferenceEmbedding:
    """The embedding [vocab_size, hidden], and rows that were added after it."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self._added = torch.empty(0, table.shape[1])

    def add_rows(self, rows: torch.Tensor) -> int:
        """Adds rows; returns how many had been added before."""
        before = len(self._added)
        self._added = torch.cat([self._added, rows.to(torch.float32)])
        return before

    def rows(self, tokens: IntArray) -> torch.Tensor:
        """[tokens, hidden]; ids beyond the vocabulary are added rows."""
        ids = torch.from_numpy(np.ascontiguousarray(tokens, dtype=np.int64))
        beyond = ids >= len(self.table)
        if not bool(beyond.any()):
            return self.table.index_select(0, ids)
        found = self.table.index_select(0, ids.masked_fill(beyond, 0))
        found[beyond] = self._added.index_select(0, ids[beyond] - len(self.table))
        return found

    def of_span(self, span: Span) -> torch.Tensor:
        """[computed nodes, hidden]: the inputs of a span; a mixture is summed in its own order."""
        graph, first = span.graph, span.first
        found = self.rows(np.maximum(graph.tokens[first:], 0))
        for node, mixture in graph.mixtures.items():
            if node >= first:
                rows = self.rows(np.asarray(mixture.tokens, dtype=np.int64))
                total = torch.zeros_like(rows[0])
                for row, weight in zip(rows, mixture.weights, strict=True):
                    total += row * weight
                found[node - first] = total
        return found


class ReferenceCache:
    """KV of all layers, and the stored hidden states (features), by slot."""

    def __init__(self, shape: ModelShape, slots: int, features: tuple[int, ...]) -> None:
        self._shape, self.slots = shape, slots
        self.keys: list[torch.Tensor] = []
        """By layer: [kv_heads, slots, head_dim]."""
        self.values: list[torch.Tensor] = []
        """By layer: [kv_heads, slots, head_dim + SPARE]; the last columns are ones."""
        sources = shape.switches.kv_layers or range(shape.layers)
        for layer, source in enumerate(sources):
            if shape.switches.recurrent is not None and shape.switches.recurrent.layers[layer]:
                self._add(0, 0)  # it has no KV
            elif source == layer:
                self._add(*head_sizes(shape, layer))
            else:
                self.keys.append(self.keys[source])
                self.values.append(self.values[source])
        self._stored = features
        self.features = zeros(slots, len(features) * shape.hidden_size)
        """[slots, stored layers * hidden]"""

    def add_layers(self, count: int) -> None:
        """Room for the KV of further layers."""
        for _ in range(count):
            self._add(self._shape.kv_heads, self._shape.head_dim)

    def _add(self, heads: int, size: int) -> None:
        self.keys.append(zeros(heads, self.slots, size))
        self.values.append(zeros(heads, self.slots, size + SPARE))

    def store_layers(self, layers: tuple[int, ...]) -> None:
        """From now on the hidden states that enter these layers are stored as well.

        Where one of them is new, all that was stored before is lost.
        """
        if new := tuple(layer for layer in layers if layer not in self._stored):
            self._stored += new
            self.features = zeros(self.slots, len(self._stored) * self._shape.hidden_size)

    def feature_range(self, layer: int) -> tuple[int, int]:
        """The columns of `features` that hold what enters a stored layer."""
        size, at = self._shape.hidden_size, self._stored.index(layer)
        return at * size, (at + 1) * size

    def keep_features(self, layer: int, x: torch.Tensor, slots: torch.Tensor) -> None:
        """Stores hidden states x [rows, hidden] that enter a layer, if it is a stored one."""
        if layer in self._stored:
            low, high = self.feature_range(layer)
            self.features[:, low:high].index_copy_(0, slots, x[: len(slots)])

    def features_of(self, layers: tuple[int, ...], slots: torch.Tensor) -> torch.Tensor:
        """[slots, layers * hidden]: the stored hidden states of some layers."""
        ranges = [self.feature_range(layer) for layer in layers]
        return torch.cat([self.features[slots, low:high] for low, high in ranges], dim=1)

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes keys and values [rows, kv_heads, head_dim]; rows beyond the slots are padding."""
        count, (heads, size) = len(slots), v.shape[1:]
        self.keys[layer].index_copy_(1, slots, k[:count].transpose(0, 1))
        with_ones = v.new_ones(heads, count, size + SPARE)
        with_ones[..., :size] = v[:count].transpose(0, 1)
        self.values[layer].index_copy_(1, slots, with_ones)

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copies everything from slots to slots; all sources are read first."""
        shared = {id(pool): pool for pool in (*self.keys, *self.values)}
        for pool in shared.values():
            pool.index_copy_(1, targets, pool.index_select(1, sources))
        if self._stored:
            self.features.index_copy_(0, targets, self.features.index_select(0, sources))
