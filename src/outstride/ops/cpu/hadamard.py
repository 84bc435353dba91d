"""Tables of the Hadamard rotation that rows go through before quantization.

A row of `depth` columns is cut into runs of `run` columns, the largest power of two that divides it.
Random signs and a Hadamard matrix mix each run; Hartley matrices, one for each prime factor of the
number of runs, mix the runs with each other. Each step is its own inverse, up to a factor of `run`.
kernels.hadamard.inc says why rows are rotated.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from outstride.core.graph import FloatArray
from outstride.ops.cpu import native

MAX_FACTOR = 64
"""Larger prime factors are left out: their runs are not mixed. As in kernels.cpp."""
SIGN_SEED = 16384
"""The seed of the signs: of five, the one that brought the default model closest to fp32 on 24 texts
of GSM8K's training set."""


@dataclass(frozen=True, slots=True)
class HadamardRotation:
    """The rotation of rows of one width."""

    depth: int
    run: int
    signs: FloatArray
    factors: npt.NDArray[np.int32]
    """Prime factors of the number of runs, and 0."""
    blends: FloatArray
    """The Hartley matrices of these factors, one after the other."""
    struct: native.HadamardStruct

    @classmethod
    @cache
    def of(cls, depth: int) -> HadamardRotation:
        if depth < 16 or depth % 16:
            raise ValueError(
                f"rows of {depth} columns cannot be rotated: the width must be a multiple of 16"
            )
        run = depth & -depth
        factors = [f for f in primes(depth // run) if f <= MAX_FACTOR]
        tables = [hartley(factor).ravel() for factor in factors]
        signs = np.where(_hashed(np.arange(SIGN_SEED, SIGN_SEED + depth)) & 1, -1.0, 1.0).astype(
            np.float32
        )
        listed = np.asarray([*factors, 0], dtype=np.int32)
        blends = np.concatenate([*tables, np.zeros(1)]).astype(np.float32)
        struct = native.HadamardStruct(
            signs.ctypes.data, listed.ctypes.data, blends.ctypes.data, run
        )
        return cls(depth, run, signs, listed, blends, struct)

    @property
    def pointer(self) -> ctypes._Pointer[native.HadamardStruct]:
        return ctypes.pointer(self.struct)


def hartley(size: int) -> npt.NDArray[np.float64]:
    """The Hartley matrix: orthogonal and symmetric, with elements of similar size."""
    angles = 2 * np.pi * (np.outer(np.arange(size), np.arange(size)) % size) / size
    table: npt.NDArray[np.float64] = (np.cos(angles) + np.sin(angles)) / np.sqrt(size)
    return table


def primes(number: int) -> list[int]:
    """The prime factors of a number, ascending."""
    found, factor = [], 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found


def _hashed(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """Pseudo-random bits, the same on every machine."""
    x = (numbers + 1).astype(np.uint32)
    with np.errstate(over="ignore"):
        for factor in (0x7FEB352D, 0x846CA68B):
            x = (x ^ (x >> np.uint32(16))) * np.uint32(factor)
    return x >> np.uint32(16)
