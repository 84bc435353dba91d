"""Paged KV of a bridged model, and its attention over token graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from outstride.errors import IntegrityError
from outstride.models.bridge.probe import SINKS, AttentionShape
from outstride.ops.arithmetic import SPARE, attention
from outstride.ops.attention_plan import AttentionPlan, plan
from outstride.ops.contract import Span
from outstride.ops.reference_memory import zeros


def kv_bytes_per_token(layers: Sequence[AttentionShape]) -> int:
    """Bytes that the keys and values of one token take in all layers."""
    return sum(4 * layer.kv_heads * (2 * layer.width + SPARE) for layer in layers)


class PagedKV:
    """Keys and values of all layers by slot; layers may differ in their heads."""

    def __init__(self, layers: Sequence[AttentionShape], slots: int, page_size: int) -> None:
        self.layers, self.page_size = layers, page_size
        self.keys = [zeros(layer.kv_heads, slots, layer.width) for layer in layers]
        """By layer: [kv_heads, slots, width]."""
        self.values = [zeros(layer.kv_heads, slots, layer.width + SPARE) for layer in layers]
        """By layer: [kv_heads, slots, width + SPARE]; the last columns are ones."""

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copies KV from slots to slots; all sources are read first."""
        for pool in (*self.keys, *self.values):
            pool.index_copy_(1, targets, pool.index_select(1, sources))


class GraphAttention:
    """Handles the attention of one pass over these spans, layer by layer."""

    def __init__(self, cache: PagedKV, spans: Sequence[Span]) -> None:
        self._cache, self._spans = cache, spans
        self._slots = torch.from_numpy(np.concatenate([s.slots[s.first :] for s in spans]))
        self._plans: dict[tuple[int, int, int | None], AttentionPlan] = {}
        self.calls = 0
        """How many layers have attended."""

    def mask(self, visible: Callable[..., torch.Tensor] | None, rows: int) -> torch.Tensor:
        return torch.zeros(1, 1, rows, rows)

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        index, cache = self.calls, self._cache
        self.calls += 1
        shape = cache.layers[index] if index < len(cache.layers) else None
        if shape is None or shape.module is not module:
            raise IntegrityError("the layers of the model attend in another order than at loading")
        rows, group, width = query.shape[2], shape.heads // shape.kv_heads, shape.width
        self._write(index, key[0], value[0])
        scaled = query[0] * shape.scale
        queries = scaled.reshape(shape.kv_heads, group, rows, -1).transpose(1, 2)
        queries = _widened(queries, width).reshape(shape.kv_heads, rows * group, width)
        sinks = options.get(SINKS)
        if sinks is not None:
            sinks = sinks.reshape(shape.kv_heads, group).repeat(1, rows)
        found = attention(
            queries, cache.keys[index], cache.values[index], self._plan(shape), shape.cap, sinks
        )
        found = found.view(shape.kv_heads, rows, group, width)[..., : shape.value_dim]
        return found.transpose(0, 1).reshape(1, rows, shape.heads, -1).contiguous()

    def _write(self, index: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Writes key and value [kv_heads, rows, dim] to the slots; rows beyond them are padding."""
        count, width = len(self._slots), self._cache.layers[index].width
        keys, values = self._cache.keys[index], self._cache.values[index]
        keys.index_copy_(1, self._slots, _widened(key[:, :count], width))
        with_ones = value.new_ones(len(value), count, width + SPARE)
        with_ones[..., :width] = _widened(value[:, :count], width)
        values.index_copy_(1, self._slots, with_ones)

    def _plan(self, shape: AttentionShape) -> AttentionPlan:
        """The plan for layers of this shape, worked out once in a pass."""
        key = shape.heads, shape.kv_heads, shape.window
        if key not in self._plans:
            self._plans[key] = plan(
                self._spans,
                group=shape.heads // shape.kv_heads,
                kv_heads=shape.kv_heads,
                window=shape.window,
                page_size=self._cache.page_size,
            )
        return self._plans[key]


def _widened(x: torch.Tensor, width: int) -> torch.Tensor:
    """x [.., dim] with columns of zeros up to `width`."""
    if x.shape[-1] == width:
        return x
    return torch.nn.functional.pad(x, (0, width - x.shape[-1]))
