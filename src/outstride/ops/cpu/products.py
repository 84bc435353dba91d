"""Rows times matrices beside the layers: the vocabulary, and what trained parts multiply."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import numpy.typing as npt

from outstride.core import host
from outstride.core.graph import FloatArray, IntArray
from outstride.core.host import address
from outstride.ops.cpu import native
from outstride.ops.cpu.machine import Machine
from outstride.ops.cpu.packed import Packed, rounded

NONE = np.array((-np.inf, 0), dtype=native.BEST)


class Products(Machine):
    """Products of single rows, and the highest results of each."""

    _best: npt.NDArray[np.void] = np.full(0, NONE)
    """What threads find, empty between calls."""

    def highest(self, x: FloatArray, matrix: Packed, count: int) -> tuple[IntArray, FloatArray]:
        """The places of the highest results of each row, best first, and the results."""
        given, scale = self._unscaled(x, matrix)
        ones = np.ones(matrix.depth, dtype=np.float32)
        found, values = self._highest(given, ones, matrix, matrix.k, count)
        return found, values * scale

    def times(self, x: FloatArray, matrix: Packed) -> FloatArray:
        """x @ matrix.T"""
        given, scale = self._unscaled(x, matrix)
        ones = np.ones(matrix.depth, dtype=np.float32)
        results = self._results(given, ones, matrix, matrix.k) * scale
        return results[:, : matrix.channels]

    def _unscaled(self, x: FloatArray, matrix: Packed) -> tuple[FloatArray, FloatArray]:
        """Rows as they are, wide enough, and what the norm takes away: it is given back."""
        given = np.zeros((len(x), matrix.depth), dtype=np.float32)
        given[:, : matrix.k] = x
        mean = np.square(given[:, : matrix.k]).mean(axis=1, keepdims=True)
        return given, np.sqrt(mean + np.float32(self._shape.norm_eps))

    def _results(
        self,
        x: FloatArray,
        norm: FloatArray,
        matrix: Packed,
        size: int,
        room: FloatArray | None = None,
    ) -> FloatArray:
        """Rows of `size` columns, normalised, times a matrix: all results, perhaps in given room."""
        rows, stride = len(x), matrix.stride
        best = np.empty(self._threads * rows, dtype=native.BEST)  # of no interest
        if room is None:
            room = np.empty(rows * stride, dtype=np.float32)
        results = room[: rows * stride].reshape(rows, stride)
        self._score(x, norm, matrix, size, 1, address(best), address(results))
        return results

    def _highest(
        self, x: FloatArray, norm: FloatArray, matrix: Packed, size: int, k: int
    ) -> tuple[IntArray, FloatArray]:
        """The same, but only the k highest results of each row: their places and values."""
        rows, k = len(x), min(max(1, k), matrix.channels)
        best, self._best = self._best, Products._best  # whoever is interrupted leaves no results
        if (needed := self._threads * rows * k) > len(best):
            best = np.full(needed, NONE)
        self._score(x, norm, matrix, size, k, address(best), None)
        found = merged(best, self._threads, rows, k, host.library())
        self._best = best
        return found

    def _score(
        self,
        x: FloatArray,
        norm: FloatArray,
        matrix: Packed,
        size: int,
        k: int,
        best: int,
        results: int | None,
    ) -> None:
        rows, width = x.shape
        if rows > self._space.rows:
            self._open(rounded(rows, 256))
        self._lib.outstride_head(
            self._engine,
            native.Head(
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
                self._shape.norm_eps,
            ),
        )


def merged(
    best: npt.NDArray[np.void], threads: int, rows: int, k: int, lib: ModuleType | None
) -> tuple[IntArray, FloatArray]:
    """The k highest of what all threads found for each row; leaves the table empty.

    Of equals the lowest channel comes first, whichever thread found it.
    """
    if lib is not None:
        tokens = np.empty((rows, k), dtype=np.int64)
        values = np.empty((rows, k), dtype=np.float32)
        lib.merge(best, threads, rows, k, tokens, values)
        return tokens, values
    mine = best[: threads * rows * k]
    found = mine.reshape(threads, rows, k).transpose(1, 0, 2).reshape(rows, -1)
    order = np.lexsort((found["token"], -found["value"]), axis=1)[:, :k]
    chosen = np.take_along_axis(found, order, axis=1)
    mine[:] = NONE
    return chosen["token"].astype(np.int64), chosen["value"].copy()
