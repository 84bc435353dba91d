"""The speculators format: one config for drafters of several kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outstride.core.draft_heads import DraftHead
from outstride.errors import CorruptModel, UnsupportedModel
from outstride.models.decoder import Decoder
from outstride.models.draft_heads import dflash, eagle
from outstride.ops.weights import DraftHeadWeights

_NAMES = {"transformer.": "layers.0.", "fusion_fc.": "fc."}
"""Prefixes of tensor names: how this format and EAGLE's own call the same tensors."""


def read(
    model: Decoder, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> tuple[DraftHead, DraftHeadWeights]:
    """Reads the kind that the config names."""
    kind, inner = about["speculators_model_type"], about.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise CorruptModel("the config lacks a transformer_layer_config")
    if kind == "eagle":
        return _first_eagle(model, about, inner, tensors)
    if kind == "eagle3":
        return eagle.read_third(model, {**about, **inner}, tensors, at="layers.0.")
    if kind == "dflash":
        aux_layers = about.get("aux_hidden_state_layer_ids")
        if about.get("sample_from_anchor") or aux_layers is None:
            raise UnsupportedModel(
                "DFlash in the speculators format needs aux_hidden_state_layer_ids, and must not set "
                "sample_from_anchor"
            )
        mask, block = about.get("mask_token_id"), about.get("block_size", 8)
        return dflash.read_block(model, inner, tensors, list(aux_layers), mask, block)
    raise UnsupportedModel(
        f"drafters of the kind {kind!r} are not supported in the speculators format; supported are "
        "dflash, eagle and eagle3"
    )


def _first_eagle(
    model: Decoder,
    about: Mapping[str, Any],
    inner: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
) -> tuple[DraftHead, DraftHeadWeights]:
    if about.get("layernorms"):
        raise UnsupportedModel("EAGLE heads with layernorms are not supported")
    renamed = {}
    for key in tensors:
        begin = next((b for b in _NAMES if key.startswith(b)), "")
        renamed[_NAMES.get(begin, "") + key.removeprefix(begin)] = tensors[key]
    return eagle.read_first(model, {**inner, "num_hidden_layers": 1}, renamed)
