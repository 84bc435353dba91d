"""FP8: a `weight` of 8-bit floats and the factors in `weight_scale` or `weight_scale_inv`.

There is one factor for a tensor, for each row, or for each block of a matrix (128 x 128 as a rule).
The weight is the product with the factor, also where the name says "inv". Scales of activations
(`input_scale`, `activation_scale`) are not used: they exist for kernels that multiply in FP8, and here
activations are float32 or are quantized to int8 row by row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from outstride.core.graph import FloatArray
from outstride.errors import UnsupportedModel
from outstride.models.stored import StoredTensor
from outstride.models.unpack.tensors import QuantizedTensor, Rows, need

PARTS = ("weight", "weight_scale", "weight_scale_inv")
IGNORED = ("input_scale", "activation_scale", "input_scale_ub", "input_zero_point")
_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class ScaledTensor(QuantizedTensor):
    """Small floats or integers times factors. block: rows and columns that share a factor."""

    def __init__(
        self, name: str, weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None
    ) -> None:
        need(weight.ndim == 2, name, "the weight is no matrix")
        super().__init__(name, tuple(weight.shape), [weight, scale])
        self._weight, factors = weight, _decoded(scale)
        rows, columns = weight.shape
        if factors.ndim < 2 or min(factors.shape) < 1:
            factors = factors.reshape(-1, 1)
        need(factors.ndim == 2 and factors.numel() > 0, name, "its scales are no matrix")
        height, width = block or (-(-rows // len(factors)), -(-columns // factors.shape[1]))
        if len(factors) == 1:
            height = rows
        if factors.shape[1] == 1:
            height, width = (1 if len(factors) == rows else height), columns
        need(
            min(height, width) > 0
            and tuple(factors.shape) == (-(-rows // height), -(-columns // width)),
            name,
            f"{tuple(factors.shape)} scales do not fit {rows} x {columns} weights",
        )
        self._scale: FloatArray = factors.numpy()
        self._height, self._width = height, width

    def floats(self, rows: Rows) -> FloatArray:
        part = self._weight[rows if isinstance(rows, slice) else torch.from_numpy(rows)]
        found: FloatArray = part.to(torch.float32, copy=True).numpy()
        factors = self._scale[np.arange(self.shape[0])[rows] // self._height]
        if factors.shape[1] == 1:
            found *= factors
        else:
            for number in range(factors.shape[1]):
                start = number * self._width
                found[:, start : start + self._width] *= factors[:, number : number + 1]
        return found


def _decoded(scale: torch.Tensor) -> torch.Tensor:
    """Factors in float32; exponents (E8M0) are stored as bytes in some files."""
    if scale.dtype == torch.uint8:
        return torch.exp2(scale.to(torch.float32) - 127)
    return scale.to(torch.float32)


def unpack(
    name: str, parts: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
) -> StoredTensor:
    """The matrix that the parts of a module describe."""
    weight = parts.get("weight")
    need(weight is not None and weight.dtype in _TYPES, name, "its weight is missing or not in FP8")
    scales = [parts[part] for part in PARTS[1:] if part in parts]
    need(len(scales) == 1, name, "it needs one of weight_scale and weight_scale_inv")
    block = settings.get("weight_block_size")
    if block is not None and len(block) != 2:
        raise UnsupportedModel(f"FP8 with blocks of {block} is not supported; use 128 x 128")
    assert weight is not None
    return ScaledTensor(name, weight, scales[0], (int(block[0]), int(block[1])) if block else None)


def is_fp8(tensor: torch.Tensor) -> bool:
    """Whether a tensor is stored in FP8."""
    return tensor.dtype in _TYPES
