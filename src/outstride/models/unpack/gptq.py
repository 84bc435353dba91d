"""GPTQ: `qweight` [columns / 8, rows], `qzeros` [groups, rows / 8], `scales` [groups, rows], `g_idx`.

Words of 32 bits hold 8 codes of 4 bits (4 of 8 bits), the first in the lowest bits: of a column of
the transposed matrix in `qweight`, of a row in `qzeros`. Files of version 1, which are nearly all,
store zeros minus one. `g_idx` names the group of each column; with `desc_act` groups are not runs of
columns, and then the weights are dequantized and quantized again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from outstride.core.graph import FloatArray
from outstride.errors import UnsupportedModel
from outstride.models.stored import StoredTensor
from outstride.models.unpack.tensors import (
    Bytes,
    GroupedTensor,
    Rows,
    as_array,
    need,
    unpacked_codes,
)

PARTS = ("qweight", "qzeros", "scales", "g_idx")
_BITS = (2, 4, 8)


class GptqTensor(GroupedTensor):
    """A matrix in GPTQ's packing."""

    def __init__(
        self, name: str, parts: Mapping[str, torch.Tensor], bits: int, offset: int
    ) -> None:
        missing = [part for part in PARTS[:3] if part not in parts]
        need(not missing, name, f"{', '.join(missing)} is missing")
        weight, zeros, scales = (parts[part] for part in PARTS[:3])
        fits = all(t.ndim == 2 for t in (weight, zeros, scales))
        need(fits and weight.dtype == zeros.dtype == torch.int32, name, "its parts are no matrices")
        per_word, rows = 32 // bits, weight.shape[1]
        need(
            tuple(scales.shape) == (len(zeros), rows) and zeros.shape[1] == -(-rows // per_word),
            name,
            "qweight, qzeros and scales have different sizes",
        )
        group_of = as_array(parts["g_idx"]).astype(np.int64) if "g_idx" in parts else None
        self._weight, self._zeros = as_array(weight), as_array(zeros)
        self._scales, self._offset = as_array(scales), offset
        super().__init__(
            name,
            (rows, weight.shape[0] * per_word),
            [weight, zeros, scales],
            bits=bits,
            groups=len(scales),
            group_of=group_of,
        )

    def codes(self, rows: Rows) -> Bytes:
        words = np.ascontiguousarray(self._weight[:, rows].T)  # [rows, columns / 8]
        return unpacked_codes(words.view(np.uint8), self.bits)

    def scales(self, rows: Rows) -> FloatArray:
        return self._scales[:, rows].T.astype(np.float32)

    def zeros(self, rows: Rows) -> FloatArray:
        packed = np.ascontiguousarray(self._zeros).view(np.uint8)
        codes = unpacked_codes(packed, self.bits)[:, : self.shape[0]][:, rows].T
        return (codes + np.uint8(self._offset) & np.uint8((1 << self.bits) - 1)).astype(np.float32)


def unpack(
    name: str, parts: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
) -> StoredTensor:
    """The matrix that the parts of a module describe."""
    bits, form = settings.get("bits"), str(settings.get("checkpoint_format") or "gptq")
    if bits not in _BITS:
        raise UnsupportedModel(f"GPTQ with {bits} bits is not supported; supported are 2, 4 and 8")
    if form not in ("gptq", "gptq_v2"):
        raise UnsupportedModel(
            f"GPTQ in the format {form!r} is not supported; get the repository in the format 'gptq'"
        )
    return GptqTensor(name, parts, bits, offset=0 if form == "gptq_v2" else 1)
