"""Recurrent layers: their sizes and their weights.

Three kinds share one form. The rows of a projection go through a causal convolution over the last
inputs of each channel; short convolutions (LFM2) stop there. In gated delta nets (Qwen3-Next) and
Mamba-2 layers (Granite 4-H) the convolved rows are queries, keys and values, and a state S of each
head takes one node after the other:

    S = decay * S;  S = S + key x (beta * (value - key . S));  output = query . S

Mamba-2 adds `key x value` without the correction. There is one form for prompts and drafts, and nodes
are taken one at a time: so a node's bits depend on its path alone, whatever the chunks of the prompt
or the shape of the tree.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outstride.errors import CorruptModel

if TYPE_CHECKING:
    import torch


class RecurrentKind(enum.Enum):
    """How a recurrent layer mixes tokens."""

    CONV = "short convolutions"
    DELTA = "gated delta nets"
    SSM = "Mamba-2"


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """Which layers of a model are recurrent, and the sizes of their states.

    key_heads: key heads of a delta net, groups of Mamba-2; each serves heads / key_heads heads.
    key_dim, value_dim: the state of a head is [key_dim, value_dim].
    eps: of the norm after the recurrence.
    step_limits: Mamba-2 clamps its step sizes to this range.
    """

    kind: RecurrentKind
    layers: tuple[bool, ...]
    kernel: int
    channels: int
    heads: int = 0
    key_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    conv_bias: bool = False
    bias: bool = False
    """Whether both projections have biases."""
    eps: float = 1e-6
    step_limits: tuple[float, float] = (0.0, math.inf)

    def __post_init__(self) -> None:
        if self.kernel < 2 or (self.heads and self.heads % self.key_heads):
            raise CorruptModel(
                f"recurrent layers with a kernel of {self.kernel} and {self.heads} heads over "
                f"{self.key_heads} key heads cannot be"
            )

    @property
    def inner(self) -> int:
        """The width of the rows that the output projection takes."""
        return self.heads * self.value_dim if self.heads else self.channels

    @property
    def projected(self) -> int:
        """The width of the rows of the input projection."""
        if self.kind is RecurrentKind.CONV:
            return 3 * self.channels
        numbers = 2 if self.kind is RecurrentKind.DELTA else 1
        return self.channels + self.inner + numbers * self.heads

    @property
    def state_bytes(self) -> int:
        """Bytes of one state in all recurrent layers."""
        numbers = (self.kernel - 1) * self.channels + self.heads * self.key_dim * self.value_dim
        return 4 * numbers * sum(self.layers)


@dataclass(frozen=True, slots=True)
class RecurrentWeights:
    """The weights of a recurrent layer besides its projections.

    The input projection is `LayerWeights.qkv`. Its rows: the channels of the convolution (queries,
    keys, values), the output gate, then what decides on beta and decay; for short convolutions the
    input gate, the output gate and the values. The output projection is `LayerWeights.output`.
    """

    conv: torch.Tensor
    """[channels, kernel], the oldest input first"""
    conv_bias: torch.Tensor | None = None
    """[channels]"""
    decay: torch.Tensor | None = None
    """[heads]: -exp(A_log)"""
    step_bias: torch.Tensor | None = None
    """[heads]"""
    skip: torch.Tensor | None = None
    """[heads]: how much of a value Mamba-2 adds to its output."""
    norm: torch.Tensor | None = None
    """[value_dim] of a delta net; [inner] of Mamba-2."""
