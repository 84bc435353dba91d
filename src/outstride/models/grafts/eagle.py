"""EAGLE and EAGLE-3: a layer that reads tokens with the states before them, and then its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outstride.core.contracts import Graft
from outstride.errors import UnsupportedModel
from outstride.models.decoder import Decoder
from outstride.models.grafts.folder import layer, shaped
from outstride.models.grafts.shape import checked_taps, graft_of, shape_of, vocabulary_of
from outstride.ops.contract import REST, FollowWeights, GraftWeights

DEPTH = 8
"""How many tokens such a part guesses at the most: nothing in it says where to end."""


def read_first(
    model: Decoder, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> tuple[Graft, GraftWeights]:
    """EAGLE: states under the target's final norm, no norm in front of attention or head."""
    config = model.config
    size, shape = config.hidden_size, shape_of(about, config)
    _one(shape.layers)
    bias = shaped(tensors, "fc.bias", (size,)) if "fc.bias" in tensors else None
    vocabulary, _ = vocabulary_of(tensors, config, own_head=False)
    weights = GraftWeights(
        taps=(config.layers,),
        scale=model.ops.final_norm(),
        mix=None,
        mixed=torch.empty(0),
        layers=[layer(tensors, "layers.0.", config, inner=shape.inner, norm=None)],
        norm=None,
        vocabulary=vocabulary,
        window=REST,
        follow=FollowWeights(
            embedding=_embedding(model, tensors),
            fuse=shaped(tensors, "fc.weight", (size, 2 * size)),
            bias=bias,
        ),
        frequencies=shape.frequencies,
        rope_scale=shape.rope_scale,
    )
    return graft_of("eagle", config, DEPTH + 1, chained=True), weights


def read_third(
    model: Decoder,
    about: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    at: str = "midlayer.",
) -> tuple[Graft, GraftWeights]:
    """EAGLE-3: states of several layers, attention over embedding and state side by side.

    The switches that later checkpoints have: `norm_before_residual` (the state under its norm is what
    the layer adds to), `norm_before_fc` (the states together have a norm), `norm_output` (it goes on
    from states under the final norm).
    """
    config = model.config
    size, shape = config.hidden_size, shape_of(about, config)
    _one(shape.layers)
    if about.get("fc_norm"):
        raise UnsupportedModel("EAGLE-3 parts with fc_norm are not supported")
    more = about.get("eagle_config") or {}
    key = "eagle_aux_hidden_state_layer_ids"
    listed = about.get(key) or more.get(key)
    count = config.layers
    taps = checked_taps(list(map(int, listed or (2, count // 2, count - 3))), config)
    wide = len(taps) * size
    vocabulary, head = vocabulary_of(tensors, config)
    early = bool(about.get("norm_before_residual"))
    norm = shaped(tensors, f"{at}hidden_norm.weight", (size,))
    own = layer(
        tensors, at, config, inner=shape.inner, reads=2, norm=None if early else "hidden_norm"
    )
    weights = GraftWeights(
        taps=taps,
        scale=shaped(tensors, "input_norm.weight", (wide,))
        if about.get("norm_before_fc")
        else None,
        mix=shaped(tensors, "fc.weight", (size, wide)),
        mixed=torch.empty(0),
        layers=[own],
        norm=shaped(tensors, "norm.weight", (size,)),
        vocabulary=vocabulary,
        window=REST,
        head=head,
        follow=FollowWeights(
            embedding=_embedding(model, tensors),
            entry=norm if early else None,
            beside=shaped(tensors, f"{at}input_layernorm.weight", (size,)),
            again=bool(about.get("norm_output")),
        ),
        frequencies=shape.frequencies,
        rope_scale=shape.rope_scale,
    )
    return graft_of("eagle", config, DEPTH + 1, chained=True), weights


def _one(layers: int) -> None:
    if layers != 1:
        raise UnsupportedModel(f"EAGLE parts have one layer; this one has {layers}")


def _embedding(model: Decoder, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    if "embed_tokens.weight" not in tensors:
        return None
    shape = (model.config.vocab_size, model.config.hidden_size)
    return shaped(tensors, "embed_tokens.weight", shape)
