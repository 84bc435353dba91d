"""Matrix products outside the layers: the LM head, and the products of draft heads."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import numpy.typing as npt

from outstride.core import host_library
from outstride.core.graph import FloatArray, IntArray
from outstride.core.host_library import address
from outstride.ops.cpu import native
from outstride.ops.cpu.int8 import Int8Matrix
from outstride.ops.cpu.runtime import Runtime

NONE = np.array((-np.inf, 0), dtype=native.BEST)
_EMPTY: npt.NDArray[np.void] = np.full(0, NONE)


class Gemm:
    """Products of float32 rows with packed matrices: all results, or the highest of each row.

    The kernel normalises its input rows (RMS norm), as the LM head needs it. `times` and `highest` are
    for rows without a norm: they multiply the results by what the norm divided the rows by.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._best = _EMPTY
        """[threads * rows * k]: where threads put what they find; all NONE between calls."""

    def highest(self, x: FloatArray, matrix: Int8Matrix, count: int) -> tuple[IntArray, FloatArray]:
        """The columns of the `count` highest results of each row of x @ matrix.T, and the results."""
        wide, scale = self._unnormed(x, matrix)
        ones = np.ones(matrix.depth, dtype=np.float32)
        found, values = self.normed_highest(wide, ones, matrix, matrix.k, count)
        return found, values * scale

    def times(self, x: FloatArray, matrix: Int8Matrix) -> FloatArray:
        """x @ matrix.T: [rows, k] to [rows, channels]."""
        wide, scale = self._unnormed(x, matrix)
        ones = np.ones(matrix.depth, dtype=np.float32)
        results = self.normed_times(wide, ones, matrix, matrix.k) * scale
        return results[:, : matrix.channels]

    def _unnormed(self, x: FloatArray, matrix: Int8Matrix) -> tuple[FloatArray, FloatArray]:
        """x padded to [rows, depth], and what the kernel's norm will divide each row by, [rows, 1]."""
        wide = np.zeros((len(x), matrix.depth), dtype=np.float32)
        wide[:, : matrix.k] = x
        mean = np.square(wide[:, : matrix.k]).mean(axis=1, keepdims=True)
        return wide, np.sqrt(mean + np.float32(self._runtime.shape.norm_eps))

    def normed_times(
        self,
        x: FloatArray,
        norm: FloatArray,
        matrix: Int8Matrix,
        size: int,
        buffer: FloatArray | None = None,
    ) -> FloatArray:
        """Results [rows, stride] of rms_norm(x[:, :size]) · norm with a matrix.

        buffer: where to put them, at least rows * stride numbers; None: in a new array.
        """
        rows, stride = len(x), matrix.stride
        unused = np.empty(self._runtime.threads * rows, dtype=native.BEST)
        if buffer is None:
            buffer = np.empty(rows * stride, dtype=np.float32)
        results = buffer[: rows * stride].reshape(rows, stride)
        self._multiply(x, norm, matrix, size, 1, address(unused), address(results))
        return results

    def normed_highest(
        self, x: FloatArray, norm: FloatArray, matrix: Int8Matrix, size: int, k: int
    ) -> tuple[IntArray, FloatArray]:
        """The k highest results of each row of that product: columns and values, both [rows, k]."""
        threads, rows, k = self._runtime.threads, len(x), min(max(1, k), matrix.channels)
        best, self._best = self._best, _EMPTY  # an interrupted call must leave no results here
        if (needed := threads * rows * k) > len(best):
            best = np.full(needed, NONE)
        self._multiply(x, norm, matrix, size, k, address(best), None)
        found = merged(best, threads, rows, k, host_library.library())
        self._best = best
        return found

    def _multiply(
        self,
        x: FloatArray,
        norm: FloatArray,
        matrix: Int8Matrix,
        size: int,
        k: int,
        best: int,
        results: int | None,
    ) -> None:
        runtime = self._runtime
        own = norm is runtime.weights.norm  # of the model, not of a draft head
        cap = runtime.shape.switches.logit_softcap if own else None
        rows, width = x.shape
        runtime.reserve(rows)
        runtime.lib.outstride_head(
            runtime.engine,
            native.LMHeadStruct(
                address(x),
                address(norm),
                matrix.pointer,
                results,
                best,
                rows,
                width,
                size,
                matrix.channels,
                k,
                runtime.shape.norm_eps,
                cap or 0.0,
            ),
        )


def merged(
    best: npt.NDArray[np.void], threads: int, rows: int, k: int, lib: ModuleType | None
) -> tuple[IntArray, FloatArray]:
    """The k highest of what all threads found for each row; leaves the table empty.

    Among equal results the lowest channel comes first, whichever thread found it.
    """
    if lib is not None:
        tokens = np.empty((rows, k), dtype=np.int64)
        values = np.empty((rows, k), dtype=np.float32)
        lib.merge(best, threads, rows, k, tokens, values)
        return tokens, values
    used = best[: threads * rows * k]
    found = used.reshape(threads, rows, k).transpose(1, 0, 2).reshape(rows, -1)
    order = np.lexsort((found["token"], -found["value"]), axis=1)[:, :k]
    chosen = np.take_along_axis(found, order, axis=1)
    used[:] = NONE
    return chosen["token"].astype(np.int64), chosen["value"].copy()
