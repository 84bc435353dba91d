"""Tables of how rows are stirred before they are rounded: kernels.stir.inc has the reasons.

A row of `depth` columns is `parts` runs of `run`, which is the largest power of two that divides it.
Signs by chance and Hadamard's matrix stir a run, Hartley's matrices the runs: one for each prime factor
of their number. Every one of them is its own way back, up to a factor of `run`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from outstride.core.graph import FloatArray
from outstride.ops.cpu import native

MOST_FACTOR = 64
"""Runs of a larger prime number are not stirred together. As in kernels.cpp."""
FIRST = 16384
"""The number from which signs are made: of five, the one that brought the default model closest to fp32
on 24 texts of GSM8K's training part."""


@dataclass(frozen=True, slots=True)
class Stir:
    """What kernels need to stir rows of one width."""

    depth: int
    run: int
    signs: FloatArray
    factors: npt.NDArray[np.int32]
    """Prime factors of the number of runs, and 0."""
    blends: FloatArray
    """A table for each of them."""
    struct: native.Stir

    @classmethod
    @cache
    def of(cls, depth: int) -> Stir:
        if depth < 16 or depth % 16:
            raise ValueError(f"rows of {depth} columns cannot be stirred: whole sixteens can")
        run = depth & -depth
        factors = [f for f in primes(depth // run) if f <= MOST_FACTOR]
        tables = [hartley(factor).ravel() for factor in factors]
        signs = np.where(_hashed(np.arange(FIRST, FIRST + depth)) & 1, -1.0, 1.0).astype(np.float32)
        listed = np.asarray([*factors, 0], dtype=np.int32)
        blends = np.concatenate([*tables, np.zeros(1)]).astype(np.float32)
        struct = native.Stir(signs.ctypes.data, listed.ctypes.data, blends.ctypes.data, run)
        return cls(depth, run, signs, listed, blends, struct)

    @property
    def pointer(self) -> ctypes._Pointer[native.Stir]:
        return ctypes.pointer(self.struct)


def hartley(size: int) -> npt.NDArray[np.float64]:
    """Sums of cosine and sine: orthogonal, symmetric, and no entry much larger than others."""
    angles = 2 * np.pi * (np.outer(np.arange(size), np.arange(size)) % size) / size
    table: npt.NDArray[np.float64] = (np.cos(angles) + np.sin(angles)) / np.sqrt(size)
    return table


def primes(number: int) -> list[int]:
    """Prime factors, in rising order."""
    found, factor = [], 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found


def _hashed(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """Bits by chance, the same everywhere."""
    x = (numbers + 1).astype(np.uint32)
    with np.errstate(over="ignore"):
        for factor in (0x7FEB352D, 0x846CA68B):
            x = (x ^ (x >> np.uint32(16))) * np.uint32(factor)
    return x >> np.uint32(16)
