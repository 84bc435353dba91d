"""EAGLE and EAGLE-3: one layer that reads each token with the hidden state before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outstride.core.draft_heads import DraftHead, EagleDraftHead
from outstride.errors import UnsupportedModel
from outstride.models.decoder import Decoder
from outstride.models.draft_heads.folder import layer, shaped
from outstride.models.draft_heads.speculator_config import (
    checked_aux_layers,
    shape_of,
    vocabulary_of,
)
from outstride.ops.weights import DraftHeadWeights, EagleWeights

DEPTH = 8
"""How many tokens deep an EAGLE head may draft: nothing in it sets a limit."""


def read_first(
    model: Decoder, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> tuple[DraftHead, DraftHeadWeights]:
    """EAGLE: hidden states after the target's final norm; no norm before attention or LM head."""
    config = model.config
    size, shape = config.hidden_size, shape_of(about, config)
    _check_single(shape.layers)
    bias = shaped(tensors, "fc.bias", (size,)) if "fc.bias" in tensors else None
    vocabulary, _ = vocabulary_of(tensors, config, own_lm_head=False)
    weights = EagleWeights(
        aux_layers=(config.layers,),
        aux_norm=model.ops.draft_heads.final_norm(),
        fusion=None,
        layer=layer(tensors, "layers.0.", config, inner=shape.inner, norm=None),
        norm=None,
        vocabulary=vocabulary,
        rope=shape.rope,
        embedding=_embedding(model, tensors),
        input_projection=shaped(tensors, "fc.weight", (size, 2 * size)),
        input_bias=bias,
    )
    return EagleDraftHead(kind="eagle", block=DEPTH + 1), weights


def read_third(
    model: Decoder,
    about: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    at: str = "midlayer.",
) -> tuple[DraftHead, DraftHeadWeights]:
    """EAGLE-3: hidden states of several layers; QKV of the concatenated embedding and hidden state.

    Switches of later checkpoints: `norm_before_residual` (the residual connection starts after the
    norm), `norm_before_fc` (the concatenated hidden states have a norm), `norm_output` (the next token
    reads the hidden state after the final norm).
    """
    config = model.config
    size, shape = config.hidden_size, shape_of(about, config)
    _check_single(shape.layers)
    if about.get("fc_norm"):
        raise UnsupportedModel("EAGLE-3 heads with fc_norm are not supported")
    nested = about.get("eagle_config") or {}
    key = "eagle_aux_hidden_state_layer_ids"
    listed = about.get(key) or nested.get(key)
    count = config.layers
    aux_layers = checked_aux_layers(list(map(int, listed or (2, count // 2, count - 3))), config)
    wide = len(aux_layers) * size
    vocabulary, lm_head = vocabulary_of(tensors, config)
    norm_first = bool(about.get("norm_before_residual"))
    norm = shaped(tensors, f"{at}hidden_norm.weight", (size,))
    aux_norm = None
    if about.get("norm_before_fc"):
        aux_norm = shaped(tensors, "input_norm.weight", (wide,))
    layer_norm = None if norm_first else "hidden_norm"
    weights = EagleWeights(
        aux_layers=aux_layers,
        aux_norm=aux_norm,
        fusion=shaped(tensors, "fc.weight", (size, wide)),
        layer=layer(tensors, at, config, inner=shape.inner, reads=2, norm=layer_norm),
        norm=shaped(tensors, "norm.weight", (size,)),
        vocabulary=vocabulary,
        lm_head=lm_head,
        rope=shape.rope,
        embedding=_embedding(model, tensors),
        hidden_norm=norm if norm_first else None,
        embedding_norm=shaped(tensors, f"{at}input_layernorm.weight", (size,)),
        feeds_back_normed=bool(about.get("norm_output")),
    )
    return EagleDraftHead(kind="eagle", block=DEPTH + 1), weights


def _check_single(layers: int) -> None:
    if layers != 1:
        raise UnsupportedModel(f"EAGLE heads have one layer; this one has {layers}")


def _embedding(model: Decoder, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    if "embed_tokens.weight" not in tensors:
        return None
    shape = (model.config.vocab_size, model.config.hidden_size)
    return shaped(tensors, "embed_tokens.weight", shape)
