"""Filters of unmasked tokens, from the recipe `unmask-filter`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outstride.core.contracts import TrainedFilter
from outstride.errors import CorruptModel, UnsupportedModel
from outstride.models.decoder import Decoder
from outstride.models.draft_heads.folder import shaped


def attach(
    model: Decoder, name: str, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Attaches a filter, which needs a masked model."""
    if model.masked_spec is None:
        raise UnsupportedModel(
            "a filter decides which masks are filled in, and this model has no masks"
        )
    try:
        units, features = int(about["units"]), int(about["features"])
        threshold = float(about["threshold"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptModel(f"the filter's config.json is damaged: {error}") from error
    outer = shaped(tensors, "outer.weight", (1, units))
    model.filters[name] = TrainedFilter(
        kind=str(about["outstride"]),
        inner=shaped(tensors, "inner.weight", (units, features)).numpy(),
        inner_bias=shaped(tensors, "inner.bias", (units,)).numpy(),
        outer=outer[0].numpy(),
        outer_bias=float(shaped(tensors, "outer.bias", (1,))[0]),
        threshold=threshold,
    )
