"""DFlash drafters: a block of masks over keys and values made from the target's states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outstride.core.contracts import Graft
from outstride.errors import CorruptModel
from outstride.models.decoder import Decoder
from outstride.models.grafts.folder import layer, shaped
from outstride.models.grafts.shape import checked_taps, graft_of, shape_of, vocabulary_of
from outstride.ops.contract import GraftWeights


def read(
    model: Decoder, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> tuple[Graft, GraftWeights]:
    """As its authors publish it: layers are counted by what leaves them; the head is the target's."""
    own = about.get("dflash_config") or {}
    ids = own.get("target_layer_ids")
    if ids is None:
        ids = default_layers(model.layers, int(about["num_hidden_layers"]))
    taps = [int(i) + 1 for i in ids]
    return read_block(model, about, tensors, taps, own.get("mask_token_id"), about["block_size"])


def default_layers(layers: int, drafting: int) -> list[int]:
    """Which of a target's layers are read where the config does not say: evenly from 1 on."""
    if drafting == 1:
        return [layers // 2]
    return [round(1 + i * (layers - 4) / (drafting - 1)) for i in range(drafting)]


def read_block(
    model: Decoder,
    about: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    taps: list[int],
    mask: int | None,
    block: int,
) -> tuple[Graft, GraftWeights]:
    """about: the config of its layers. taps: the layers that the states enter."""
    config = model.config
    if mask is None:
        raise CorruptModel("the config does not name a mask_token_id")
    shape, read = shape_of(about, config), checked_taps(taps, config)
    size, wide = config.hidden_size, len(read) * config.hidden_size
    vocabulary, head = vocabulary_of(tensors, config)
    weights = GraftWeights(
        taps=read,
        scale=torch.ones(wide),
        mix=shaped(tensors, "fc.weight", (size, wide)),
        mixed=shaped(tensors, "hidden_norm.weight", (size,)),
        layers=[
            layer(tensors, f"layers.{i}.", config, inner=shape.inner) for i in range(shape.layers)
        ],
        norm=shaped(tensors, "norm.weight", (size,)),
        vocabulary=vocabulary,
        head=head,
        frequencies=shape.frequencies,
        rope_scale=shape.rope_scale,
    )
    return graft_of("block-drafter", config, int(block), int(mask)), weights
