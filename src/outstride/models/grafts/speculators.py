"""The speculators format: one config for drafters of several kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outstride.core.contracts import Graft
from outstride.errors import CorruptModel, UnsupportedModel
from outstride.models.decoder import Decoder
from outstride.models.grafts import dflash, eagle
from outstride.ops.contract import GraftWeights

_NAMES = {"transformer.": "layers.0.", "fusion_fc.": "fc."}
"""How the tensors of the first EAGLE begin here, and elsewhere."""


def read(
    model: Decoder, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> tuple[Graft, GraftWeights]:
    """By what the config says that the folder holds."""
    kind, inner = about["speculators_model_type"], about.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise CorruptModel("the config lacks a transformer_layer_config")
    if kind == "eagle":
        return _first_eagle(model, about, inner, tensors)
    if kind == "eagle3":
        return eagle.read_third(model, {**about, **inner}, tensors, at="layers.0.")
    if kind == "dflash":
        taps = about.get("aux_hidden_state_layer_ids")
        if about.get("sample_from_anchor") or taps is None:
            raise UnsupportedModel(
                "DFlash in the speculators format needs aux_hidden_state_layer_ids, and its guesses "
                "from the masks alone"
            )
        mask, block = about.get("mask_token_id"), about.get("block_size", 8)
        return dflash.read_block(model, inner, tensors, list(taps), mask, block)
    raise UnsupportedModel(
        f"drafters of the kind {kind!r} are not supported in the speculators format; supported are "
        "dflash, eagle and eagle3"
    )


def _first_eagle(
    model: Decoder,
    about: Mapping[str, Any],
    inner: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
) -> tuple[Graft, GraftWeights]:
    if about.get("layernorms"):
        raise UnsupportedModel("EAGLE parts with layernorms are not supported")
    renamed = {}
    for key in tensors:
        begin = next((b for b in _NAMES if key.startswith(b)), "")
        renamed[_NAMES.get(begin, "") + key.removeprefix(begin)] = tensors[key]
    return eagle.read_first(model, {**inner, "num_hidden_layers": 1}, renamed)
