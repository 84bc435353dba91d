"""Filters on hidden states, from the recipes `accept-head` and `judge`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outstride.core.contracts import TrainedFilter
from outstride.models.decoder import Decoder
from outstride.models.draft_heads.folder import shaped


def attach(
    model: Decoder, name: str, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Attaches a filter on the hidden states that leave the last layer.

    about: the folder's config.json; `beside` counts the features next to the hidden state.
    """
    units, size = int(about["inner"]), model.config.hidden_size + int(about["beside"])
    model.filters[name] = TrainedFilter(
        kind=str(about["outstride"]),
        inner=shaped(tensors, "inner.weight", (units, size)).numpy(),
        inner_bias=shaped(tensors, "inner.bias", (units,)).numpy(),
        outer=shaped(tensors, "outer.weight", (1, units))[0].numpy(),
        outer_bias=float(shaped(tensors, "outer.bias", (1,))[0]),
        threshold=0.0,
        layer=model.layers,
    )
