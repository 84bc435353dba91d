"""Weights, KV cache and thread pool of the CPU backend, with the buffers that its passes work in."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from outstride.core.graph import FloatArray, IntArray
from outstride.core.host_library import address
from outstride.ops.cpu import native
from outstride.ops.cpu.adapters import PackedAdapters
from outstride.ops.cpu.int4 import GROUP, SPREAD
from outstride.ops.cpu.int8 import rounded
from outstride.ops.cpu.weights import PackedLayerWeights, PackedModel, in_huge_pages, widths
from outstride.ops.cpu.workspace import Workspace, address_or_none
from outstride.ops.switches import GELU_TANH
from outstride.ops.weights import AdapterWeights, ModelShape, attention_scale

ROWS = 256
"""Buffers hold a multiple of this number of rows."""


def threads() -> int:
    """As many as there are cores that this process may use."""
    return max(1, min(64, len(os.sched_getaffinity(0))))


def _rope_tables(
    positions: int, frequencies: Sequence[float], factor: float
) -> tuple[FloatArray, FloatArray]:
    """Cosines and sines, both [positions, head_dim / 2]."""
    each = np.asarray(frequencies)
    angles = np.outer(np.arange(positions), each)
    scale = np.where(each == 0, 1.0, factor)  # no RoPE, no factor
    return (np.cos(angles) * scale).astype(np.float32), (np.sin(angles) * scale).astype(np.float32)


@dataclass(slots=True)
class ExtraLayers:
    """Layers of a draft head, numbered after all layers that were there before."""

    first: int
    layers: list[PackedLayerWeights]
    kv_norm: FloatArray | None
    """[width]: norm of the fused hidden states that become KV of these layers; None: they do not."""
    kv_calls: list[native.LayerStruct] = field(default_factory=list)
    """For the kernels: the layers with that norm instead of their own. Made by `Runtime.open`."""


class Runtime:
    """Weights in int8 or (layers only) int4, KV cache in int8, and the native thread pool.

    The thread pool and the workspace have room for a number of rows; `open` replaces both where that
    number grows or layers are added. Kernels get addresses of arrays, so all of these are kept here.
    """

    def __init__(
        self,
        shape: ModelShape,
        weights: PackedModel,
        *,
        slots: int,
        page_size: int,
        features: tuple[int, ...] = (),
        isa: int | None = None,
        count: int | None = None,
    ) -> None:
        self.lib = native.library()
        self.isa = native.chosen_isa() if isa is None else isa
        self.threads = threads() if count is None else count
        self.shape = shape
        self.page_size = page_size
        if page_size % 16:
            raise ValueError("page_size must be a multiple of 16")
        if shape.head_dim % 2:
            raise ValueError("head_dim must be even")
        self.record: int = self.lib.outstride_record(shape.head_dim)
        """Bytes of the keys, or values, of sixteen slots and one KV head."""
        if not self.record:
            raise ValueError("head_dim is too large for the native kernels")
        self.weights = weights
        self.width, self.heads_width, self.mlp_width = widths(shape)
        self._make_tables(min(shape.context, 1024))
        self.slots = slots
        self.keys = [self._new_kv() for _ in range(shape.layers)]
        self.values = [self._new_kv() for _ in range(shape.layers)]
        self.stored_layers = features
        """The layers whose input hidden states are stored."""
        self.features = np.zeros(
            (slots if features else 0, len(features) * shape.hidden_size), dtype=np.float32
        )
        """[slots, stored layers * hidden]"""
        self.windows: list[int | None] = list(shape.windows)
        self.adapters = PackedAdapters()
        self._extra: list[ExtraLayers] = []
        inner = shape.experts.size if shape.experts is not None else 0
        self._depth = max(self.width, self.mlp_width, self.heads_width, rounded(inner, 16))
        """The width of the widest rows that are multiplied."""
        self.engine: int | None = None
        self.open(ROWS)

    def __del__(self) -> None:
        if getattr(self, "engine", None):
            self.lib.outstride_close(self.engine)

    def _new_kv(self) -> npt.NDArray[np.uint8]:
        """Keys or values of a layer, for all slots; they take memory only once they are written."""
        return in_huge_pages(max(self.slots // 16, 1) * self.shape.kv_heads * self.record)

    def _make_tables(self, positions: int) -> None:
        """What depends on positions: RoPE (with and without a window), the growth of queries."""
        switches, local = self.shape.switches, self.shape.switches.local_rope
        self.cos, self.sin = _rope_tables(positions, self.shape.frequencies, self.shape.rope_scale)
        self._local = (
            None if local is None else _rope_tables(positions, local.frequencies, local.scale)
        )
        self._growth: FloatArray | None = None
        if (grows := switches.query_growth) is not None:
            steps = np.log(1.0 + np.arange(positions) // grows.interval)
            self._growth = (1.0 + grows.beta * steps).astype(np.float32)

    def _set_tables(self) -> None:
        struct = self.space.struct
        struct.cos, struct.sin = address(self.cos), address(self.sin)
        if self._local is not None:
            struct.local_cos, struct.local_sin = (address(table) for table in self._local)
        struct.growth = address_or_none(self._growth)

    # --- thread pool and workspace ----------------------------------------------------------------

    def open(self, rows: int) -> None:
        """Replaces thread pool and workspace: for this many rows, and for all layers."""
        if self.engine is not None:
            self.lib.outstride_close(self.engine)
        shape, depth = self.shape, rounded(self._depth, GROUP)
        group = shape.heads // shape.kv_heads
        attention = self.lib.outstride_scratch(group, shape.head_dim, rows)
        scratch = max(self.width, attention, SPREAD * (depth + GROUP))
        self.engine = self.lib.outstride_open(self.threads, self.isa, rows, depth, scratch)
        if not self.engine:
            raise MemoryError("the native kernels could not be started")
        self.space = space = Workspace(
            rows,
            shape,
            self.windows,
            self.width,
            self.weights.layers[0].qkv.stride,
            self.heads_width,
            self.mlp_width,
            self.page_size,
        )
        if self.adapters:
            space.reserve_ranks(self.adapters.max_rank, self.threads)
        self._reserve_experts(rows)
        self._set_tables()
        layers = [*self.weights.layers, *(layer for extra in self._extra for layer in extra.layers)]
        calls = [self._call(i, layer, layer.attention_norm) for i, layer in enumerate(layers)]
        self.calls = (native.LayerStruct * len(calls))(*calls)
        for extra in self._extra:
            if extra.kv_norm is not None:
                extra.kv_calls = [
                    self._call(extra.first + i, layer, extra.kv_norm)
                    for i, layer in enumerate(extra.layers)
                ]

    def _reserve_experts(self, rows: int) -> None:
        """Buffers of the kernels for layers with experts, all of which have the same sizes."""
        experts = next((layer.experts for layer in self.weights.layers if layer.experts), None)
        if experts is None:
            return
        if self.lib.outstride_reserve_experts(self.engine, experts.struct, rows, self.width):
            raise MemoryError("there is no memory for the buffers of a layer with experts")

    def _call(self, i: int, layer: PackedLayerWeights, norm: FloatArray) -> native.LayerStruct:
        """Describes a layer to the kernels, with this norm of its input."""
        shape, space, own = self.shape, self.space, i < self.shape.layers
        switches, rotates = shape.switches, not own or shape.rope_layers[i]
        local = own and switches.local_rope is not None and shape.windows[i] is not None
        return native.LayerStruct(
            ctypes.pointer(space.struct),
            space.nodes[self.windows[i]],
            norm.ctypes.data if not own or switches.pre_norms else None,
            address_or_none(layer.query_norm),
            address_or_none(layer.key_norm),
            layer.mlp_norm.ctypes.data if not own or switches.pre_norms else None,
            ctypes.pointer(layer.qkv.struct),
            ctypes.pointer(layer.output.struct),
            ctypes.pointer(layer.gate_up.struct),
            ctypes.pointer(layer.down.struct),
            self.keys[i].ctypes.data,
            self.values[i].ctypes.data,
            self.adapters.of_layer(i) if own and self.adapters else None,
            (2 if local else 1) if rotates else 0,
            own and shape.wide_norms,
            (shape.clip or 0.0) if own else 0.0,
            address_or_none(layer.attention_post_norm),
            address_or_none(layer.mlp_post_norm),
            address_or_none(layer.sinks),
            int(own and switches.activation == GELU_TANH),
            (switches.attention_softcap or 0.0) if own else 0.0,
            attention_scale(shape) if own else 0.0,
            None if layer.experts is None else ctypes.pointer(layer.experts.struct),
        )

    def reserve(self, rows: int) -> None:
        """Room for passes of this many rows."""
        if rows > self.space.rows:
            self.open(rounded(rows, ROWS))

    def reserve_depth(self, depth: int) -> None:
        """Room for products of rows that are this wide."""
        self._depth = max(self._depth, depth)
        self.open(self.space.rows)

    def reserve_positions(self, last: int) -> None:
        """RoPE tables that reach up to this position."""
        if last >= len(self.cos):
            self._make_tables(2 * last + 1)
            self._set_tables()

    # --- what is attached -------------------------------------------------------------------------

    def attach_adapter(self, layers: Sequence[AdapterWeights]) -> int:
        """Takes a LoRA adapter for the model's own layers; returns its number."""
        sizes = self.width, self.heads_width, self.mlp_width
        number = self.adapters.add(layers, self.weights.layers, sizes)
        self.open(self.space.rows)
        return number

    def detach_adapter(self, number: int) -> None:
        """Drops a LoRA adapter."""
        self.adapters.remove(number)
        self.open(self.space.rows)

    def add_layers(
        self,
        layers: list[PackedLayerWeights],
        window: int | None,
        depth: int,
        kv_norm: FloatArray | None,
    ) -> ExtraLayers:
        """Adds the layers of a draft head; depth: the width of the widest rows that it multiplies."""
        extra = ExtraLayers(len(self.keys), layers, kv_norm)
        self._extra.append(extra)
        self.windows += [window] * len(layers)
        self.keys += [self._new_kv() for _ in layers]
        self.values += [self._new_kv() for _ in layers]
        self.reserve_depth(depth)
        return extra

    # --- stored hidden states ---------------------------------------------------------------------

    def store_layers(self, layers: tuple[int, ...]) -> None:
        """From now on the hidden states that enter these layers are stored as well.

        Where one of them is new, all that was stored before is lost.
        """
        if new := tuple(layer for layer in layers if layer not in self.stored_layers):
            self.stored_layers += new
            size = len(self.stored_layers) * self.shape.hidden_size
            self.features = np.zeros((self.slots, size), dtype=np.float32)

    def feature_range(self, layer: int) -> tuple[int, int]:
        """The columns of `features` that hold what enters a stored layer."""
        size, at = self.shape.hidden_size, self.stored_layers.index(layer)
        return at * size, (at + 1) * size

    def features_of(self, layers: tuple[int, ...], where: slice | IntArray) -> FloatArray:
        """[rows, layers * hidden]: the stored hidden states of some layers at some slots."""
        stored = self.features[where]
        ranges = [self.feature_range(layer) for layer in layers]
        return np.concatenate([stored[:, low:high] for low, high in ranges], axis=1)

    def move(self, sources: IntArray, targets: IntArray) -> None:
        """Copies KV and stored hidden states between slots; all sources are read first."""
        count = len(sources)
        both = np.concatenate([sources, targets]).astype(np.int64)
        if len(targets) != count or (count and not (both.min() >= 0 and both.max() < self.slots)):
            raise ValueError("a slot outside the cache")
        buffer = np.empty(count * 2 * self.shape.kv_heads * (self.record // 16), dtype=np.uint8)
        self.lib.outstride_move(
            self.calls[0],
            len(self.calls),
            address(both),
            address(both[count:]),
            count,
            address(buffer),
        )
        if self.stored_layers:
            self.features[targets] = self.features[sources]
