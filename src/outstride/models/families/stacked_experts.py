"""Checkpoints that store the experts of a layer as one tensor: [experts, out, in]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from outstride.models.families.family import Unfuse

if TYPE_CHECKING:
    import torch


def stacked(gate_up: str, down: str) -> Mapping[str, Unfuse]:
    """How to take apart tensors of these names: gate and up projections in one; down projections."""

    def inner(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        found = {}
        for i, both in enumerate(tensor):
            for name, part in zip(("gate", "up"), both.chunk(2), strict=True):
                found[f"mlp.experts.{i}.{name}_proj.weight"] = part
        return found

    def outer(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return {f"mlp.experts.{i}.down_proj.weight": part for i, part in enumerate(tensor)}

    return {gate_up: inner, down: outer}
