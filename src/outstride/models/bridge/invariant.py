"""Operations of torch whose bits depend on the batch, replaced by ones whose bits do not.

torch computes some activations with vector instructions, and with other code for what is left over at
the end of each thread's share of the buffer. So equal rows get different bits at different places of
a batch. Here they are written out in functions that have no such remainder.

A matrix product chooses its kernel by the number of rows. Batches have one fixed shape, but experts
get the rows that chose them. So every product of another number of rows is cut and padded to ROWS.
Reductions treat all rows of a batch alike. All of it is checked for each model when it is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from outstride.ops.arithmetic import TILE

ROWS = TILE
"""Rows of every batch and of every product."""


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1.0 / (x.neg().exp() + 1.0)


def silu(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return x / (x.neg().exp() + 1.0)


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    if approximate == "tanh":
        return 0.5 * x * ((math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))).tanh() + 1.0)
    return 0.5 * x * ((x * math.sqrt(0.5)).erf() + 1.0)


def softplus(x: torch.Tensor, beta: float = 1.0, threshold: float = 20.0) -> torch.Tensor:
    scaled = x * beta
    return torch.where(scaled > threshold, x, scaled.exp().log1p() / beta)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [.., in] @ weight.T [in, out] + bias, ROWS rows at a time."""
    rows = x.numel() // max(x.shape[-1], 1)
    if rows == ROWS:
        return functional.linear(x, weight, bias)
    padded = x.new_zeros(-(-rows // ROWS) * ROWS, x.shape[-1])
    padded[:rows] = x.reshape(rows, x.shape[-1])
    tiles = [
        functional.linear(padded[start : start + ROWS], weight, bias)
        for start in range(0, len(padded), ROWS)
    ]
    found = torch.cat(tiles) if tiles else x.new_zeros(0, len(weight))
    return found[:rows].view(*x.shape[:-1], len(weight))


_REPLACED: dict[Any, Callable[..., torch.Tensor]] = {
    functional.linear: linear,
    functional.silu: silu,
    functional.gelu: gelu,
    functional.softplus: softplus,
    functional.sigmoid: sigmoid,
    torch.sigmoid: sigmoid,
    torch.Tensor.sigmoid: sigmoid,
}


class RowInvariant(TorchFunctionMode):
    """Within it, calls of these operations go to the functions above."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _REPLACED.get(func, func)(*args, **(kwargs or {}))
