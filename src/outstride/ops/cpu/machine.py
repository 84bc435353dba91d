"""A model's weights and cache in native formats, and the engine of threads that works on them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

from outstride.core.graph import FloatArray
from outstride.ops.contract import AdapterWeights, Model, Shape
from outstride.ops.cpu import native
from outstride.ops.cpu.adapters import Adapter
from outstride.ops.cpu.following import Follower
from outstride.ops.cpu.grafts import Grafted
from outstride.ops.cpu.groups import GROUP, SPREAD
from outstride.ops.cpu.packed import Packed, rounded
from outstride.ops.cpu.weights import Layer, Weights, in_large_pages, widths
from outstride.ops.cpu.workspace import Workspace, maybe
from outstride.ops.heads import Heads


def threads() -> int:
    """As many as there are cores that this process may use."""
    return max(1, min(64, len(os.sched_getaffinity(0))))


class Machine:
    """Weights in int8, those of layers perhaps in int4; cache in int8."""

    def __init__(
        self,
        shape: Shape,
        weights: Weights,
        *,
        slots: int,
        page_size: int,
        features: tuple[int, ...] = (),
        isa: int | None = None,
        count: int | None = None,
    ) -> None:
        self._lib = native.library()
        self._isa = self._lib.outstride_best_isa() if isa is None else isa
        self._threads = threads() if count is None else count
        self._shape = shape
        self._page_size = page_size
        if page_size % 16:
            raise ValueError("pages must hold a multiple of 16 entries")
        if shape.head_dim % 2:
            raise ValueError("heads must have an even number of dimensions")
        self._record: int = self._lib.outstride_record(shape.head_dim)
        if not self._record:
            raise ValueError("heads have too many dimensions for the native kernels")
        self._weights = weights
        weights.into_large_pages()
        self.width, self._heads_width, self._middle = widths(shape)
        self._extra = np.zeros((0, shape.hidden_size), dtype=np.float32)
        self._cos, self._sin = self._turns(min(shape.context, 1024))
        self._slots = slots
        self._keys = [self._entries() for _ in range(shape.layers)]
        self._values = [self._entries() for _ in range(shape.layers)]
        self._planes = features
        self._features = np.zeros(
            (slots if features else 0, len(features) * shape.hidden_size), dtype=np.float32
        )
        self._adapter: Adapter | None = None
        self._grafts: dict[str, Grafted] = {}
        self._followers: dict[str, Follower] = {}
        self._heads: dict[str, Heads[Packed]] = {}
        self._deepest = 0
        """The width of the widest rows that trained heads multiply."""
        self.windows: tuple[int | None, ...] = tuple(shape.windows)
        self._engine: int | None = None
        stored = "int8 x 8 bit" if weights.bits == 8 else "int4 x 12 bit (head int8 x 8 bit)"
        self.name = f"cpu {native.ISAS[self._isa]} {stored}, cache int8"
        self._open(256)

    @classmethod
    def of(
        cls, model: Model, isa: int | None = None, count: int | None = None, bits: int = 8
    ) -> Self:
        """From float32 weights, which are packed and dropped one by one."""
        return cls(
            model.shape,
            Weights.pack(model, bits),
            slots=model.slots,
            page_size=model.page_size,
            features=model.features,
            isa=isa,
            count=count,
        )

    def __del__(self) -> None:
        if getattr(self, "_engine", None):
            self._lib.outstride_close(self._engine)

    def _entries(self) -> npt.NDArray[np.uint8]:
        """Keys or values of a layer, for all slots; they take memory only once they are written."""
        return in_large_pages(max(self._slots // 16, 1) * self._shape.kv_heads * self._record)

    def _turns(self, positions: int) -> tuple[FloatArray, FloatArray]:
        """Cosines and sines of all angles up to a position."""
        angles = np.outer(np.arange(positions), np.asarray(self._shape.frequencies))
        scale = self._shape.rope_scale
        return (
            (np.cos(angles) * scale).astype(np.float32),
            (np.sin(angles) * scale).astype(np.float32),
        )

    def _open(self, rows: int) -> None:
        """A native engine and a workspace with room for so many rows."""
        if self._engine is not None:
            self._lib.outstride_close(self._engine)
        shape = self._shape
        depth = max(self.width, self._middle, self._heads_width, self._deepest)
        parts: list[Grafted | Follower] = [*self._grafts.values(), *self._followers.values()]
        parts.sort(key=lambda part: part.first)
        depth = rounded(max(depth, *(part.depth for part in parts), 0), GROUP)
        group = shape.heads // shape.kv_heads
        attention = self._lib.outstride_scratch(group, shape.head_dim, rows)
        scratch = max(self.width, attention, SPREAD * (depth + GROUP))
        self._engine = self._lib.outstride_open(self._threads, self._isa, rows, depth, scratch)
        if not self._engine:
            raise MemoryError("the native kernels could not be started")
        self._space = space = Workspace(
            rows,
            shape,
            self.windows,
            self.width,
            self._weights.layers[0].qkv.stride,
            self._heads_width,
            self._middle,
            self._page_size,
        )
        if self._adapter:
            space.make_room(self._adapter.ranks, self._threads)
        space.struct.cos, space.struct.sin = self._cos.ctypes.data, self._sin.ctypes.data
        layers = [*self._weights.layers]
        for part in parts:
            layers += part.layers
        calls = [self._call(i, layer, layer.attention_norm) for i, layer in enumerate(layers)]
        self._calls = (native.Layer * len(calls))(*calls)
        for graft in self._grafts.values():
            graft.calls = [
                self._call(graft.first + i, layer, graft.mixed)
                for i, layer in enumerate(graft.layers)
            ]

    def _call(self, i: int, layer: Layer, norm: FloatArray) -> native.Layer:
        """What tells the kernels of a layer, under this norm of its input."""
        shape, space, own = self._shape, self._space, i < self._shape.layers
        return native.Layer(
            ctypes.pointer(space.struct),
            space.nodes[self.windows[i]],
            norm.ctypes.data,
            maybe(layer.query_norm),
            maybe(layer.key_norm),
            layer.mlp_norm.ctypes.data,
            ctypes.pointer(layer.qkv.struct),
            ctypes.pointer(layer.output.struct),
            ctypes.pointer(layer.gate_up.struct),
            ctypes.pointer(layer.down.struct),
            self._keys[i].ctypes.data,
            self._values[i].ctypes.data,
            self._adapter.layers[i] if own and self._adapter else None,
            shape.rope_layers[i] if own else True,
        )

    def adapt(self, layers: Sequence[AdapterWeights]) -> None:
        """Takes in an adapter."""
        sizes = self.width, self._heads_width, self._middle
        self._adapter = Adapter.pack(layers, self._weights.layers, sizes)
        self._open(self._space.rows)
