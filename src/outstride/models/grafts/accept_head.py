"""Judges of states, from what the recipes `accept-head` and `judge` leave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outstride.core.contracts import Filter
from outstride.models.decoder import Decoder
from outstride.models.grafts.folder import shaped


def attach(
    model: Decoder, name: str, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Takes in a judge of the states that leave the last layer."""
    units, size = int(about["inner"]), model.config.hidden_size + int(about["beside"])
    model.filters[name] = Filter(
        kind=str(about["outstride"]),
        inner=shaped(tensors, "inner.weight", (units, size)).numpy(),
        inner_bias=shaped(tensors, "inner.bias", (units,)).numpy(),
        outer=shaped(tensors, "outer.weight", (1, units))[0].numpy(),
        outer_bias=float(shaped(tensors, "outer.bias", (1,))[0]),
        threshold=0.0,
        layer=model.layers,
    )
