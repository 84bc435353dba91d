"""AWQ in the packing of its GEMM kernels: `qweight` [columns, rows / 8], `qzeros`, `scales`.

A word of 32 bits holds 8 codes of neighbouring rows in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from outstride.core.graph import FloatArray
from outstride.errors import UnsupportedModel
from outstride.models.stored import StoredTensor
from outstride.models.unpack.tensors import Bytes, GroupedTensor, Rows, as_array, need, nibbles

PARTS = ("qweight", "qzeros", "scales")
_PLACE = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Where in its word each of eight rows is."""


class AwqTensor(GroupedTensor):
    """A matrix in the packing of AWQ's GEMM kernels."""

    def __init__(self, name: str, parts: Mapping[str, torch.Tensor]) -> None:
        missing = [part for part in PARTS if part not in parts]
        need(not missing, name, f"{', '.join(missing)} is missing")
        weight, zeros, scales = (parts[part] for part in PARTS)
        fits = all(t.ndim == 2 for t in (weight, zeros, scales))
        need(fits and weight.dtype == zeros.dtype == torch.int32, name, "its parts are no matrices")
        rows = weight.shape[1] * 8
        need(
            tuple(scales.shape) == (len(zeros), rows) and zeros.shape[1] == weight.shape[1],
            name,
            "qweight, qzeros and scales have different sizes",
        )
        self._weight, self._zeros, self._scales = (as_array(t) for t in (weight, zeros, scales))
        super().__init__(
            name,
            (rows, len(weight)),
            [weight, zeros, scales],
            bits=4,
            groups=len(scales),
        )

    def codes(self, rows: Rows) -> Bytes:
        return self._columns(self._weight, rows)

    def scales(self, rows: Rows) -> FloatArray:
        return self._scales[:, rows].T.astype(np.float32)

    def zeros(self, rows: Rows) -> FloatArray:
        return self._columns(self._zeros, rows).astype(np.float32)

    def _columns(self, packed: npt.NDArray[np.generic], rows: Rows) -> Bytes:
        """Columns of packed codes: [height, rows / 8] words to [rows, height]."""
        wanted = np.arange(self.shape[0])[rows]
        words, at = np.unique(wanted // 8, return_inverse=True)
        some = packed[:, words] if len(words) < packed.shape[1] else packed
        codes = nibbles(np.ascontiguousarray(some).view(np.uint8))  # [height, 8 * words]
        found: Bytes = np.ascontiguousarray(codes.T)[at * 8 + _PLACE[wanted % 8]]
        return found


def unpack(
    name: str, parts: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
) -> StoredTensor:
    """The matrix that the parts of a module describe."""
    bits = settings.get("bits", settings.get("w_bit", 4))
    version = str(settings.get("version") or "gemm").lower()
    if bits != 4 or version != "gemm":
        raise UnsupportedModel(
            f"AWQ with {bits} bits in the version {version!r} is not supported; supported are 4 bits "
            "in the version 'gemm'"
        )
    return AwqTensor(name, parts)
