"""MXFP4 experts (gpt-oss): `NAME_blocks` [experts, rows, groups, 16] and `NAME_scales`, without groups.

A byte holds two codes, the low one first; a code is one of sixteen numbers, and 32 of them share a
power of two. Rows of gate and up alternate in `gate_up_proj`.
"""

from __future__ import annotations

import numpy as np
import torch

from outstride.core.graph import FloatArray
from outstride.models.stored import StoredTensor
from outstride.models.unpack.tensors import QuantizedTensor, Rows, TensorRows, need, nibbles

BLOCKS, SCALES = "_blocks", "_scales"
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = np.array([*_POSITIVE, *(-v for v in _POSITIVE)], dtype=np.float32)


class Mxfp4Tensor(QuantizedTensor):
    """One matrix: blocks [rows, groups, 16] and exponents [rows, groups], both bytes."""

    def __init__(self, name: str, blocks: torch.Tensor, scales: torch.Tensor) -> None:
        need(
            blocks.dtype == scales.dtype == torch.uint8
            and blocks.ndim == 3
            and blocks.shape[2] == 16
            and blocks.shape[:2] == scales.shape,
            name,
            "blocks and scales do not fit together",
        )
        super().__init__(name, (len(blocks), blocks.shape[1] * 32), [blocks, scales])
        self._blocks, self._scales = blocks.numpy(), scales.numpy()

    def floats(self, rows: Rows) -> FloatArray:
        blocks = self._blocks[rows]
        found: FloatArray = VALUES[nibbles(blocks.reshape(len(blocks), -1))]
        exponents = self._scales[rows].astype(np.int32) - 127
        with np.errstate(over="ignore"):
            grouped = np.ldexp(found.reshape(*exponents.shape, 32), exponents[..., None])
        return grouped.reshape(found.shape)


def unpack(name: str, blocks: torch.Tensor, scales: torch.Tensor) -> dict[str, StoredTensor]:
    """The matrices of all experts that a tensor holds, by their own names.

    name: that of the tensor without `_blocks`, such as `model.layers.0.mlp.experts.gate_up_proj`.
    """
    need(blocks.ndim == 4 and scales.ndim == 3, name, "it does not hold the matrices of experts")
    need(len(blocks) == len(scales), name, "blocks and scales do not fit together")
    at, _, kind = name.rpartition(".")
    found: dict[str, StoredTensor] = {}
    for expert in range(len(blocks)):
        whole = Mxfp4Tensor(name, blocks[expert], scales[expert])
        if kind == "gate_up_proj":
            for first, part in enumerate(("gate_proj", "up_proj")):
                ours = f"{at}.{expert}.{part}.weight"
                found[ours] = TensorRows(ours, whole, first, whole.shape[0], 2)
        else:
            ours = f"{at}.{expert}.{kind}.weight"
            found[ours] = TensorRows(ours, whole, 0, whole.shape[0])
    return found
