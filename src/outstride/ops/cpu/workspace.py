"""The buffers of passes, and what tells the kernels of them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outstride.core import host
from outstride.core.graph import BoolArray, IntArray
from outstride.core.host import address
from outstride.ops.contract import Shape, Span
from outstride.ops.cpu import native
from outstride.ops.cpu.keys import Layout


@dataclass(slots=True)
class Batch:
    """The spans of a run of layers; what else they need is in the workspace."""

    spans: Sequence[Span]
    rows: int
    slots: IntArray
    where: slice | IntArray
    """The slots once more: as a slice if they follow each other, which is quick to read and write."""


def together(slots: IntArray) -> slice | IntArray:
    """Slots (or rows, or nodes) that follow each other as a slice."""
    listed = slots.tolist()
    if not listed:
        return slots
    first, count = listed[0], len(listed)
    if listed[-1] == first + count - 1 and listed == list(range(first, first + count)):
        return slice(first, first + count)
    return slots


def maybe(array: npt.NDArray[np.generic] | None) -> int | None:
    """Where an array lies, for structures in which there need not be one."""
    return None if array is None else address(array)


class Workspace:
    """Buffers for so many rows, and the structures that tell the kernels about them.

    They are filled for each pass and never move, so that a layer's structure is made once.
    """

    def __init__(
        self,
        rows: int,
        shape: Shape,
        windows: Sequence[int | None],
        width: int,
        qkv: int,
        heads: int,
        middle: int,
        page_size: int,
    ) -> None:
        self.rows = rows
        self._width = width
        self.x = np.zeros((0, width), dtype=np.float32)
        self.queries = np.zeros((rows, qkv), dtype=np.float32)
        self._mixed = np.zeros((rows, heads), dtype=np.float32)
        self._middle = np.zeros((rows, middle), dtype=np.float32)
        self.layout = Layout(rows, windows, page_size, host.library())
        self.nodes = {
            window: ctypes.pointer(ctypes.c_void_p(address(nodes)))
            for window, nodes in self.layout.nodes.items()
        }
        self._gates: BoolArray | None = None
        self._low = np.zeros((0, 0), dtype=np.float32)
        self.struct = native.Pass(
            qkv=address(self.queries),
            mixed=address(self._mixed),
            middle=address(self._middle),
            positions=address(self.layout.positions),
            slots=address(self.layout.slots),
            width=width,
            hidden=shape.hidden_size,
            heads_width=heads,
            middle_width=middle,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            eps=shape.norm_eps,
            scale=shape.head_dim**-0.5,
            page_size=page_size,
        )

    def make_room(self, ranks: int, threads: int) -> None:
        """For the values to which an adapter reduces rows; few rows are reduced by every thread."""
        self._low = np.zeros((max(self.rows, 4 * threads), ranks), dtype=np.float32)
        self.struct.low, self.struct.ranks = address(self._low), ranks

    def fill(self, spans: Sequence[Span], rows: int, gates: BoolArray | None) -> None:
        """Sets a pass up. Its states are an array of their own, which outlives the pass."""
        struct, layout = self.struct, self.layout
        layout.lay(spans)
        self.x = np.zeros((rows, self._width), dtype=np.float32)
        struct.x = address(self.x)
        struct.pages = address(layout.pages)
        struct.tails = address(layout.tails)
        struct.rows = rows
        self._gates = gates
        struct.gates = maybe(gates)
