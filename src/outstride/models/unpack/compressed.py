"""compressed-tensors: int4 or int8 in words (`weight_packed`), int8 and FP8 as they are (`weight`).

Scales are [rows, groups], [rows, 1], [1] or one for each block. Packed codes are signed numbers plus
half of their range, in the order of their bits. Zero points, if a checkpoint has any, are packed along
the rows. `weight_g_idx` names the group of each column where columns were reordered by activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from outstride.core.graph import FloatArray
from outstride.errors import UnsupportedModel
from outstride.models.stored import StoredTensor
from outstride.models.unpack import fp8
from outstride.models.unpack.tensors import (
    Bytes,
    GroupedTensor,
    Rows,
    as_array,
    need,
    unpacked_codes,
)

PARTS = (
    "weight_packed",
    "weight",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
)
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense")


class CompressedTensor(GroupedTensor):
    """Integer codes, packed into words or as int8."""

    def __init__(self, name: str, parts: Mapping[str, torch.Tensor]) -> None:
        packed = parts.get("weight_packed")
        stored = parts["weight"] if packed is None else packed
        scale = parts.get("weight_scale")
        need(scale is not None and stored.ndim == 2, name, "weight_scale is missing, or no matrix")
        assert scale is not None
        shape, self._bits_of_word = _shape(name, parts, stored)
        self._stored = as_array(stored)
        scales = as_array(scale.to(torch.float32).reshape(-1, 1) if scale.ndim < 2 else scale)
        need(len(scales) in (1, shape[0]), name, "weight_scale has another number of rows")
        self._scales = scales
        group_of = as_array(parts["weight_g_idx"]) if "weight_g_idx" in parts else None
        if group_of is not None and (not group_of.size or group_of.min() < 0):
            group_of = None  # not filled: columns were not reordered
        super().__init__(
            name,
            shape,
            [stored, scale, *(p for n, p in parts.items() if n == "weight_zero_point")],
            bits=self._bits_of_word,
            groups=scales.shape[1],
            group_of=None if group_of is None else group_of.astype(np.int64),
        )
        self._zeros = self._zero_points(parts.get("weight_zero_point"))

    def _zero_points(self, stored: torch.Tensor | None) -> FloatArray:
        """The codes that stand for zero: [rows or 1, groups]."""
        half = np.float32(1 << (self.bits - 1))
        if stored is None:
            return np.full((1, self.groups), half)
        if stored.dtype == torch.int32:
            across = np.ascontiguousarray(as_array(stored).reshape(-1, self.groups).T)
            codes = unpacked_codes(across.view(np.uint8), self.bits).T[: len(self._scales)]
            need(len(codes) == len(self._scales), self.name, "weight_zero_point is too short")
            return codes.astype(np.float32)
        found = as_array(stored.to(torch.float32)).reshape(-1, self.groups)
        need(len(found) == len(self._scales), self.name, "weight_zero_point has another size")
        return found.astype(np.float32) + half

    def codes(self, rows: Rows) -> Bytes:
        some = np.ascontiguousarray(self._stored[rows])
        if some.dtype == np.int8:
            return some.view(np.uint8) ^ np.uint8(128)
        return unpacked_codes(some.view(np.uint8), self.bits)[:, : self.shape[1]]

    def scales(self, rows: Rows) -> FloatArray:
        return self._of_rows(self._scales, rows)

    def zeros(self, rows: Rows) -> FloatArray:
        return self._of_rows(self._zeros, rows)

    def _of_rows(self, values: Any, rows: Rows) -> FloatArray:
        if len(values) == self.shape[0]:
            return np.asarray(values[rows], dtype=np.float32)
        count = len(np.arange(self.shape[0])[rows])
        return np.broadcast_to(values, (count, self.groups)).astype(np.float32)


def _shape(
    name: str, parts: Mapping[str, torch.Tensor], stored: torch.Tensor
) -> tuple[tuple[int, int], int]:
    """Rows and columns of a matrix, and the bits of a code."""
    rows, width = stored.shape
    if "weight_packed" not in parts:
        need(stored.dtype == torch.int8, name, f"its weights are {stored.dtype}, not int8")
        return (rows, width), 8
    stated = parts.get("weight_shape")
    need(stored.dtype == torch.int32, name, f"weight_packed is {stored.dtype}, not int32")
    need(stated is not None and stated.numel() == 2, name, "weight_shape is missing")
    assert stated is not None
    height, columns = (int(size) for size in stated.tolist())
    bits = next((b for b in (4, 8, 2) if -(-columns * b // 32) == width), None)
    need(height == rows and columns > 0, name, "weight_shape does not fit weight_packed")
    if bits is None:
        raise UnsupportedModel(
            f"{name!r} has codes that are not 2, 4 or 8 bits wide, which is not supported"
        )
    return (rows, columns), bits


def unpack(
    name: str, parts: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
) -> StoredTensor:
    """The matrix that the parts of a module describe."""
    weight = parts.get("weight")
    if weight is not None and fp8.is_fp8(weight):
        scale = parts.get("weight_scale")
        need(scale is not None, name, "weight_scale is missing")
        assert scale is not None
        return fp8.ScaledTensor(name, weight, scale, _block(settings))
    need("weight_packed" in parts or weight is not None, name, "weight_packed is missing")
    return CompressedTensor(name, parts)


def _block(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """The blocks that share a scale, if the config has one size for all."""
    groups = settings.get("config_groups") or {}
    found = {
        tuple(weights["block_structure"])
        for group in groups.values()
        if (weights := group.get("weights") or {}).get("strategy") == "block"
        and len(weights.get("block_structure") or ()) == 2
    }
    return found.pop() if len(found) == 1 else None


def check_formats(settings: Mapping[str, Any]) -> None:
    """Refuses packings that are not read here: sparse ones, and FP4 with scales of scales."""
    groups = (settings.get("config_groups") or {}).values()
    named = [settings.get("format"), *(group.get("format") for group in groups)]
    for form in named:
        if form is not None and form not in FORMATS and form != "mixed-precision":
            raise UnsupportedModel(
                f"compressed-tensors in the format {form!r} is not supported; supported are "
                f"{', '.join(FORMATS)}: get the repository that it was made from"
            )
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise UnsupportedModel(
            f"compressed-tensors with sparse weights ({sparsity}) is not supported; get the dense "
            "repository that it was made from"
        )
