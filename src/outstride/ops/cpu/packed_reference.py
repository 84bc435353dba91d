"""`PackedReference`: the reference backend with int8 or int4 matrices, multiplied by native code.

It runs models whose layers the native passes do not have: those with a recurrent state. The recurrence
is native, too. Norms, RoPE, attention and the KV cache are those of the reference, in float32. The bits
of a row depend on that row alone there, and so they do in native code.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch

from outstride.core.graph import FloatArray
from outstride.core.host_library import address
from outstride.ops.arithmetic import padded
from outstride.ops.contract import Span
from outstride.ops.cpu import native
from outstride.ops.cpu.int4 import GROUP, SPREAD, Int4Matrix
from outstride.ops.cpu.int8 import Int8Matrix, rounded
from outstride.ops.cpu.recurrence import NativeRecurrence
from outstride.ops.cpu.runtime import ROWS, threads
from outstride.ops.reference import Reference
from outstride.ops.reference_batch import ReferenceBatch
from outstride.ops.weights import DraftHeadWeights, LayerWeights, ModelShape, ModelWeights

_EPS = 1e-12
"""Of the norm that the kernel applies to its input rows; the result is multiplied by it again."""


class ProductPool:
    """The thread pool that multiplies float32 rows with packed matrices."""

    def __init__(self) -> None:
        self.lib = native.library()
        self.isa, self.threads = native.chosen_isa(), threads()
        self.rows = 0
        """The rows of the pass under way that are no padding."""
        self._room, self._depth = 0, 0
        self._engine: int | None = None

    def __del__(self) -> None:
        if getattr(self, "_engine", None):
            self.lib.outstride_close(self._engine)

    def _reserve(self, rows: int, depth: int) -> None:
        if self._engine is not None and rows <= self._room and depth <= self._depth:
            return
        if self._engine is not None:
            self.lib.outstride_close(self._engine)
        self._room = max(self._room, rounded(rows, ROWS))
        self._depth = max(self._depth, rounded(depth, GROUP))
        scratch = SPREAD * (self._depth + GROUP)
        self._engine = self.lib.outstride_open(
            self.threads, self.isa, self._room, self._depth, scratch
        )
        if not self._engine:
            raise MemoryError("the native kernels could not be started")

    def times(self, x: FloatArray, matrix: Int8Matrix | Int4Matrix) -> FloatArray:
        """x @ matrix.T: [rows, k] to [rows, channels].

        The kernel normalises its rows (RMS norm), so results are multiplied by what it divided by.
        """
        rows, stride = len(x), matrix.tiles * 16
        self._reserve(rows, matrix.depth)
        wide = np.zeros((rows, matrix.depth), dtype=np.float32)
        wide[:, : matrix.k] = x
        mean = np.square(wide[:, : matrix.k]).mean(axis=1, keepdims=True)
        ones = np.ones(matrix.depth, dtype=np.float32)
        best = np.empty(self.threads * rows, dtype=native.BEST)
        results = np.empty((rows, stride), dtype=np.float32)
        self.lib.outstride_head(
            self._engine,
            native.LMHeadStruct(
                address(wide),
                address(ones),
                ctypes.pointer(matrix.struct),
                address(results),
                address(best),
                rows,
                matrix.depth,
                matrix.k,
                matrix.channels,
                1,
                _EPS,
            ),
        )
        results *= np.sqrt(mean + np.float32(_EPS))
        return results[:, : matrix.channels]


class PackedWeight:
    """A packed matrix [out, in] in the place of a tensor. Implements `arithmetic.Multiplies`."""

    def __init__(self, weight: torch.Tensor, bits: int, pool: ProductPool) -> None:
        kind = Int8Matrix if bits == 8 else Int4Matrix
        depth = rounded(weight.shape[1], 32)
        self._matrix: Int8Matrix | Int4Matrix = kind.of(weight.numpy(), None, depth)
        self._pool = pool
        self.shape = weight.shape

    def __len__(self) -> int:
        return int(self.shape[0])

    def times(self, x: torch.Tensor) -> torch.Tensor:
        """x @ weight.T; rows that are padding of the pass stay zero."""
        result = torch.zeros(len(x), len(self))
        rows = self._pool.rows if padded(self._pool.rows) == len(x) else len(x)
        found = self._pool.times(x[:rows].numpy(), self._matrix)
        result[:rows] = torch.from_numpy(found)
        return result

    def index_select(self, dim: int, ids: torch.Tensor) -> torch.Tensor:
        """Rows in float32, for embeddings."""
        assert dim == 0
        assert isinstance(self._matrix, Int8Matrix)
        return torch.from_numpy(self._matrix.rows(ids.numpy(), int(self.shape[1])))


class PackedReference(Reference):
    """Weights in int8 or int4 (embedding and LM head always in int8); everything else as there."""

    @classmethod
    def supports(cls, shape: ModelShape) -> str | None:
        native.chosen_isa()  # a wrong OUTSTRIDE_ISA is an error before anything is loaded
        return None

    def __init__(self, model: ModelWeights, bits: int = 8) -> None:
        self._pool = pool = ProductPool()
        table = cast(torch.Tensor, PackedWeight(model.embedding, 8, pool))
        head = None if model.head is None else cast(torch.Tensor, PackedWeight(model.head, 8, pool))
        layers = []
        while model.layers:  # each layer is dropped once it is packed
            layers.append(_packed(model.layers.pop(0), bits, pool))
        super().__init__(replace(model, embedding=table, head=head, layers=layers))
        if self.states is not None and self.states.shape.heads:
            self.states.recurrence = NativeRecurrence(self.states.shape)
        self.weights = f"int{bits}"
        stored = "int8" if bits == 8 else "int4 in groups (head int8)"
        self.name = (
            f"cpu {native.ISAS[pool.isa]} {stored} products, the rest in reference fp32, "
            f"threads {torch.get_num_threads()}"
        )
        self.draft_heads.unsupported_draft_head = _no_draft_heads  # type: ignore[method-assign]

    def begin(self, spans: Sequence[Span], windows: Sequence[int | None]) -> ReferenceBatch:
        self._pool.rows = spans[-1].rows.stop
        return super().begin(spans, windows)


def _no_draft_heads(weights: DraftHeadWeights) -> str | None:
    del weights
    return "with a recurrent state, draft heads run in fp32 only; use weights fp32"


def _packed(layer: LayerWeights, bits: int, pool: ProductPool) -> LayerWeights:
    """A layer with packed matrices. Small ones (router, gates) stay as they are."""

    def pack(weight: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, PackedWeight(weight, bits, pool)) if len(weight) else weight

    experts = layer.experts
    if experts is not None:
        experts = replace(
            experts,
            gate_up=cast(torch.Tensor, [pack(one) for one in experts.gate_up]),
            down=cast(torch.Tensor, [pack(one) for one in experts.down]),
        )
    return replace(
        layer,
        qkv=pack(layer.qkv),
        output=pack(layer.output),
        gate_up=pack(layer.gate_up),
        down=pack(layer.down),
        experts=experts,
    )
