"""The buffers of passes, and the structures that describe them to the kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outstride.core import host_library
from outstride.core.graph import IntArray
from outstride.core.host_library import address
from outstride.ops.contract import AdapterRows, Span
from outstride.ops.cpu import native
from outstride.ops.cpu.attention_metadata import CpuAttentionMetadata
from outstride.ops.weights import ModelShape


@dataclass(slots=True)
class CpuBatch:
    """The spans of a run of layers; everything else that the layers need is in the workspace."""

    spans: Sequence[Span]
    rows: int
    slots: IntArray
    """[rows]"""
    slot_index: slice | IntArray
    """The slots once more, as a slice if they are consecutive: faster to read and write."""


def as_slice(indices: IntArray) -> slice | IntArray:
    """Indices as a slice if they are consecutive."""
    listed = indices.tolist()
    if not listed:
        return indices
    first, count = listed[0], len(listed)
    if listed[-1] == first + count - 1 and listed == list(range(first, first + count)):
        return slice(first, first + count)
    return indices


def address_or_none(array: npt.NDArray[np.generic] | None) -> int | None:
    """Where an array lies, for structures in which it is optional."""
    return None if array is None else address(array)


class Workspace:
    """Buffers for a number of rows, and the structure that describes them to the kernels.

    They are filled for each pass and never move, so a layer's structure is made once. Widths are
    padded: `width` of hidden states, `qkv` of queries, keys and values, `heads` of all query heads,
    `inner` of the MLP.
    """

    def __init__(
        self,
        rows: int,
        shape: ModelShape,
        windows: Sequence[int | None],
        width: int,
        qkv: int,
        heads: int,
        inner: int,
        page_size: int,
    ) -> None:
        self.rows = rows
        self._width = width
        self.x = np.zeros((0, width), dtype=np.float32)
        """[rows of the pass, width]: hidden states."""
        self.queries = np.zeros((rows, qkv), dtype=np.float32)
        self._attended = np.zeros((rows, heads), dtype=np.float32)
        self._inner = np.zeros((rows, inner), dtype=np.float32)
        post_norms = shape.switches.post_norms
        self._branch = np.zeros((rows if post_norms else 0, width), dtype=np.float32)
        """[rows, width]: what attention or the MLP adds to hidden states, before its norm."""
        self.layout = CpuAttentionMetadata(rows, windows, page_size, host_library.library())
        self.nodes = {
            window: ctypes.pointer(ctypes.c_void_p(address(nodes)))
            for window, nodes in self.layout.nodes.items()
        }
        self._adapter_rows: AdapterRows | None = None
        self._reduced = np.zeros((0, 0), dtype=np.float32)
        self.struct = native.PassStruct(
            qkv=address(self.queries),
            mixed=address(self._attended),
            middle=address(self._inner),
            branch=address(self._branch),
            positions=address(self.layout.positions),
            slots=address(self.layout.slots),
            width=width,
            hidden=shape.hidden_size,
            heads_width=heads,
            middle_width=inner,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            eps=shape.norm_eps,
            scale=shape.head_dim**-0.5,
            page_size=page_size,
        )

    def reserve_ranks(self, max_rank: int, threads: int) -> None:
        """Room for what LoRA adapters reduce rows to; every thread reduces a few rows by itself."""
        self._reduced = np.zeros((max(self.rows, 4 * threads), max_rank), dtype=np.float32)
        self.struct.low, self.struct.ranks = address(self._reduced), max_rank

    def fill(self, spans: Sequence[Span], rows: int, adapter_rows: AdapterRows | None) -> None:
        """Sets a pass up. Its hidden states `x` are a new array, which outlives the pass."""
        struct, layout = self.struct, self.layout
        layout.fill(spans)
        self.x = np.zeros((rows, self._width), dtype=np.float32)
        struct.x = address(self.x)
        struct.pages = address(layout.pages)
        struct.tails = address(layout.tails)
        struct.rows = rows
        self._adapter_rows = adapter_rows
        struct.adapter_rows = address_or_none(adapter_rows)
