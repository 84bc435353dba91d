"""Mixtures of experts in the layout of the kernels.

All experts of a layer are one matrix: each expert has whole tiles, so it is a range of tiles, which the
kernels find by its number. The router stays in float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from outstride.core.graph import FloatArray
from outstride.ops.cpu import native
from outstride.ops.cpu.int4 import Int4Matrix
from outstride.ops.cpu.int8 import Int8Matrix, rounded
from outstride.ops.cpu.workspace import address_or_none
from outstride.ops.routing import ExpertShape, Routing
from outstride.ops.switches import ClampedSwiglu

Matrix: TypeAlias = Int8Matrix | Int4Matrix

EXPERTS = "experts."
"""Prefix of the names that matrices and vectors of experts have in a layer."""
EXPERT_MATRICES = ("experts.gate_up", "experts.down")
EXPERT_VECTORS = ("experts.router", "experts.router_bias", "experts.bias", "experts.shared_gate")


def expert_sizes(
    experts: ExpertShape, hidden: int, width: int, to: int
) -> dict[str, tuple[int, int, int]]:
    """Channels, columns and padded columns of the matrices of all experts of a layer.

    width: the padded hidden size. to: columns are padded to a multiple of this.
    """
    inner = rounded(experts.size, 16)
    return {
        "experts.gate_up": (experts.count * 2 * inner, hidden, rounded(width, to)),
        "experts.down": (experts.count * rounded(hidden, 32), experts.size, rounded(inner, to)),
    }


@dataclass(slots=True)
class PackedExperts:
    """The experts of a layer and their router."""

    routing: Routing
    count: int
    router: FloatArray
    """[experts, width]"""
    router_bias: FloatArray | None
    """[experts]: added to the router's logits."""
    bias: FloatArray | None
    """[experts]: added to the scores by which experts are chosen."""
    shared_gate: FloatArray | None
    """[width]: the shared expert is scaled by a sigmoid of the product with it."""
    gate_up: Matrix
    down: Matrix
    activation: ClampedSwiglu | None = None
    struct: native.ExpertsStruct = field(init=False)

    def __post_init__(self) -> None:
        routing = self.routing
        self.struct = native.ExpertsStruct(
            self.router.ctypes.data,
            address_or_none(self.router_bias),
            address_or_none(self.bias),
            address_or_none(self.shared_gate),
            ctypes.pointer(self.gate_up.struct),
            ctypes.pointer(self.down.struct),
            self.count,
            routing.per_token,
            routing.sigmoid,
            routing.biased,
            routing.normalized,
            routing.groups,
            routing.groups_kept,
            routing.scale,
            0.0 if self.activation is None else self.activation.alpha,
            0.0 if self.activation is None else self.activation.limit,
        )

    @classmethod
    def empty(
        cls,
        experts: ExpertShape,
        width: int,
        optional: Collection[str],
        matrices: Mapping[str, Matrix],
        activation: ClampedSwiglu | None = None,
    ) -> PackedExperts:
        """Experts to be filled."""

        def vector(name: str, size: int) -> FloatArray | None:
            return np.zeros(size, dtype=np.float32) if name in optional else None

        return cls(
            routing=experts.routing,
            count=experts.count,
            router=np.zeros((experts.count, width), dtype=np.float32),
            router_bias=vector("experts.router_bias", experts.count),
            bias=vector("experts.bias", experts.count),
            shared_gate=vector("experts.shared_gate", width),
            gate_up=matrices["experts.gate_up"],
            down=matrices["experts.down"],
            activation=activation,
        )
