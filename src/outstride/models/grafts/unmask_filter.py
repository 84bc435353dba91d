"""Filters of guesses, from what the recipe `unmask-filter` leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outstride.core.contracts import Filter
from outstride.errors import CorruptModel, UnsupportedModel
from outstride.models.decoder import Decoder
from outstride.models.grafts.folder import shaped


def attach(
    model: Decoder, name: str, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Takes in a filter; only a model that fills in masks has guesses for it."""
    if model.masking is None:
        raise UnsupportedModel("a filter judges what stands in masks, and this model knows none")
    try:
        units, shown = int(about["units"]), int(about["features"])
        threshold = float(about["threshold"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptModel(f"the filter's config.json is damaged: {error}") from error
    outer = shaped(tensors, "outer.weight", (1, units))
    model.filters[name] = Filter(
        kind=str(about["outstride"]),
        inner=shaped(tensors, "inner.weight", (units, shown)).numpy(),
        inner_bias=shaped(tensors, "inner.bias", (units,)).numpy(),
        outer=outer[0].numpy(),
        outer_bias=float(shaped(tensors, "outer.bias", (1,))[0]),
        threshold=threshold,
    )
