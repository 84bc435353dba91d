"""The recurrence of gated delta nets and Mamba-2 layers in native code; same bits as in torch."""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from outstride.ops.cpu import native
from outstride.ops.cpu.runtime import threads
from outstride.ops.recurrent import RecurrentShape
from outstride.ops.recurrent_plan import NodeLevel, RecurrentSteps
from outstride.ops.recurrent_states import NodeInputs

_I, _P = c.c_int32, c.c_void_p


class RecurrenceStruct(c.Structure):
    """One layer's recurrence; mirrors `Recurrence` in kernels.recurrent.inc."""

    _fields_ = (
        *((name, _I) for name in ("heads", "key_heads", "key_dim", "value_dim")),
        *((name, _I) for name in ("spans", "steps", "buffers", "copies", "rows")),
        *((name, _P) for name in ("nodes", "sources", "targets", "copied_steps", "copies_to")),
        *((name, _P) for name in ("initial", "keys", "values", "decay", "beta", "queries", "out")),
    )


class NativeRecurrence:
    """Runs levels of nodes head by head, the state of a head in the processor's cache.

    Implements `recurrent_states.Recurrence`.
    """

    def __init__(self, shape: RecurrentShape) -> None:
        self._shape = shape
        self._recur = native.library().outstride_recur
        self._recur.argtypes = [c.POINTER(RecurrenceStruct), c.c_int, c.c_int]
        self._recur.restype = c.c_int
        self._workers = ThreadPoolExecutor(threads(), thread_name_prefix="outstride-recurrence")
        self._steps: tuple[Sequence[NodeLevel], int, RecurrentSteps] | None = None

    def __call__(
        self,
        states: torch.Tensor,
        before: Sequence[int | None],
        levels: Sequence[NodeLevel],
        nodes: NodeInputs,
        queries: torch.Tensor | None,
        rows: int,
    ) -> torch.Tensor:
        """Runs the nodes and copies states to slots as the levels say; the outputs of the first rows.

        states: [slots, heads, key_dim, value_dim]; before: the slot of each span, None for zeros.
        queries: [nodes, key_heads, key_dim]; None: nothing is returned but zeros.
        """
        shape, steps = self._shape, self._steps_of(levels, len(before))
        out = torch.zeros(rows, shape.heads, shape.value_dim)
        size = states[0].numel() * 4
        address = states.data_ptr()

        def pointers(slots: Sequence[int | None]) -> npt.NDArray[np.uint64]:
            found = [0 if slot is None else address + slot * size for slot in slots]
            return np.asarray(found or [0], dtype=np.uint64)

        copied = np.asarray([step for step, _ in steps.copies] or [0], dtype=np.int32)
        copies_to, initial = pointers([slot for _, slot in steps.copies]), pointers(before)
        parts = [x.contiguous() for x in (nodes.keys, nodes.values, nodes.decay, nodes.beta)]
        asked = None if queries is None else queries.contiguous()
        call = RecurrenceStruct(
            *(shape.heads, shape.key_heads, shape.key_dim, shape.value_dim),
            *(len(before), len(steps.nodes), steps.buffers, len(steps.copies), rows),
            *(a.ctypes.data for a in (steps.nodes, steps.sources, steps.targets)),
            *(a.ctypes.data for a in (copied, copies_to, initial)),
            *(part.data_ptr() for part in parts[:3]),
            parts[3].data_ptr() if parts[3].shape[1] else None,
            None if asked is None else asked.data_ptr(),
            out.data_ptr(),
        )
        edges = np.linspace(0, shape.heads, min(threads(), shape.heads) + 1).astype(int).tolist()
        runs = [
            self._workers.submit(self._recur, c.byref(call), low, high)
            for low, high in pairwise(edges)
        ]
        if not all(run.result() for run in runs):
            raise MemoryError("no memory for the states of a pass")
        return out

    def _steps_of(self, levels: Sequence[NodeLevel], spans: int) -> RecurrentSteps:
        """The steps of levels; all layers of a pass ask for the same ones."""
        if self._steps is None or self._steps[0] is not levels or self._steps[1] != spans:
            self._steps = levels, spans, RecurrentSteps.of(levels, spans)
        return self._steps[2]
