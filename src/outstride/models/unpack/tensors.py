"""Tensors that several tensors of a file describe: codes, scales and zero points."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from outstride.core.graph import FloatArray, IntArray
from outstride.errors import CorruptModel
from outstride.models.stored import StoredTensor

GROUP = 32
"""Weights of a 4-bit block (Q4_1): a scale and a minimum in half precision, and 16 bytes of codes."""
_MIN_NORMAL = 2.0**-14

Bytes: TypeAlias = npt.NDArray[np.uint8]
Rows: TypeAlias = IntArray | slice


def as_array(tensor: torch.Tensor) -> npt.NDArray[np.generic]:
    """A tensor of integers or of ordinary floats as numpy sees it; bfloat16 becomes float32."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.to(torch.float32)
    return tensor.detach().numpy()


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """The bytes of a tensor, flat."""
    found: Bytes = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return found


def need(condition: bool, name: str, problem: str) -> None:
    """An error that names a quantized tensor whose parts do not fit together."""
    if not condition:
        raise CorruptModel(f"the quantized tensor {name!r} is damaged: {problem}")


class QuantizedTensor(StoredTensor):
    """A matrix that several tensors of a file describe. parts: these tensors."""

    def __init__(self, name: str, shape: tuple[int, ...], parts: Sequence[torch.Tensor]) -> None:
        self.name, self.shape, self._parts = name, shape, parts

    def raw(self) -> Bytes:
        return np.concatenate([bytes_of(part) for part in self._parts])[None]

    def summary(self) -> bytes:
        return b"".join(_RawPart(self.name, part).summary() for part in self._parts)


class _RawPart(StoredTensor):
    """One of the tensors that describe a quantized one: only its bytes."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name, self.shape, self._tensor = name, tuple(tensor.shape), tensor

    def floats(self, rows: Rows) -> FloatArray:
        raise NotImplementedError(f"{self.name} has no rows of its own")

    def raw(self) -> Bytes:
        return bytes_of(self._tensor)[None]


class TensorRows(StoredTensor):
    """Some rows of another tensor, in order. first, last, step: as in a slice."""

    def __init__(
        self, name: str, whole: StoredTensor, first: int, last: int, step: int = 1
    ) -> None:
        self._rows = range(first, last, step)
        self.name, self.shape, self._whole = name, (len(self._rows), *whole.shape[1:]), whole

    @property
    def has_codes(self) -> bool:
        return self._whole.has_codes

    def floats(self, rows: Rows) -> FloatArray:
        return self._whole.floats(self._of_whole(rows))

    def blocks(self, rows: Rows) -> Bytes:
        return self._whole.blocks(self._of_whole(rows))

    def raw(self) -> Bytes:
        return self._whole.raw()

    def summary(self) -> bytes:
        return f"{self._rows}".encode() + self._whole.summary()

    def _of_whole(self, rows: Rows) -> Rows:
        found = self._rows
        if isinstance(rows, slice):
            found = found[rows]
            return slice(found.start, found.stop, found.step)
        return found.start + rows * found.step


class GroupedTensor(QuantizedTensor):
    """Integer codes [rows, columns]; a weight is `(code - zero) * scale` of its group.

    Groups are runs of equal length along a row, or whatever `group_of` says for each column. Methods
    differ in how codes, scales and zeros are packed.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        parts: Sequence[torch.Tensor],
        *,
        bits: int,
        groups: int,
        group_of: IntArray | None = None,
    ) -> None:
        super().__init__(name, shape, parts)
        self.bits, self.groups, self._group_of = bits, groups, group_of
        need(groups > 0 and min(shape) > 0, name, "it has no weights or no scales")
        if group_of is not None:
            fits = len(group_of) == shape[1] and group_of.min() >= 0 and group_of.max() < groups
            need(bool(fits), name, "its columns belong to groups that do not exist")
            if shape[1] % groups == 0:
                in_order = np.arange(shape[1]) // (shape[1] // groups)
                self._group_of = None if np.array_equal(group_of, in_order) else group_of
        if self._group_of is None:
            need(shape[1] % groups == 0, name, "its groups do not have the same length")

    @abstractmethod
    def codes(self, rows: Rows) -> Bytes:
        """Unsigned codes: [rows, columns]."""

    @abstractmethod
    def scales(self, rows: Rows) -> FloatArray:
        """In float32: [rows, groups]."""

    @abstractmethod
    def zeros(self, rows: Rows) -> FloatArray:
        """The codes that stand for zero, in float32: [rows, groups]."""

    def floats(self, rows: Rows) -> FloatArray:
        found = self.codes(rows).astype(np.float32)
        scale, zero = self.scales(rows), self.zeros(rows)
        if self._group_of is not None:
            found -= zero[:, self._group_of]
            found *= scale[:, self._group_of]
            return found
        grouped = found.reshape(len(found), self.groups, -1)
        grouped -= zero[..., None]
        grouped *= scale[..., None]
        return found

    @cached_property
    def has_codes(self) -> bool:
        """Whether the codes can be taken as they are.

        They need groups of a multiple of 32 columns, and scales that half precision holds with its
        full precision. `minimum = -zero * scale` is rounded to half precision: that moves a weight by
        at most 1/256 of a step.
        """
        if self.bits != 4 or self._group_of is not None:
            return False
        if self.shape[1] // self.groups % GROUP:
            return False
        size = np.abs(self.scales(slice(None)))
        fits = ((size >= _MIN_NORMAL) & (size * 16 < 65504)) | (size == 0)
        return bool(fits.all())

    def blocks(self, rows: Rows) -> Bytes:
        codes = self.codes(rows)
        count, columns = codes.shape
        scale, zero = self.scales(rows), self.zeros(rows)
        repeated = columns // self.groups // GROUP
        result = np.empty((count, columns // GROUP, 20), dtype=np.uint8)
        ends = np.stack([scale, -zero * scale], axis=-1).astype(np.float16)
        ends = np.repeat(ends, repeated, axis=1)
        result[..., :4] = ends.view(np.uint8).reshape(count, -1, 4)
        halves = codes.reshape(count, -1, 2, 16)
        np.left_shift(halves[:, :, 1], 4, out=result[..., 4:])
        result[..., 4:] |= halves[:, :, 0]
        return result.reshape(count, -1)


def nibbles(packed: Bytes) -> Bytes:
    """Two codes of every byte, the low one first: [rows, bytes] to [rows, 2 * bytes]."""
    found = np.empty((*packed.shape, 2), dtype=np.uint8)
    np.bitwise_and(packed, 15, out=found[..., 0])
    np.right_shift(packed, 4, out=found[..., 1])
    return found.reshape(len(packed), -1)


def unpacked_codes(packed: Bytes, bits: int) -> Bytes:
    """Codes of 2, 4 or 8 bits in the order of their bits: [rows, bytes] to [rows, codes]."""
    if bits == 8:
        return packed
    if bits == 4:
        return nibbles(packed)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    found = packed[..., None] >> shifts & np.uint8((1 << bits) - 1)
    return found.reshape(len(packed), -1)
