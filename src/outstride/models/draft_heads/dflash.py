"""DFlash drafters: a block of masks that attends to KV made from the target's hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outstride.core.draft_heads import BigramTable, BlockDraftHead, DraftHead
from outstride.errors import CorruptModel
from outstride.models.decoder import Decoder
from outstride.models.draft_heads.folder import layer, shaped
from outstride.models.draft_heads.speculator_config import (
    checked_aux_layers,
    shape_of,
    vocabulary_of,
)
from outstride.ops.weights import BlockDrafterWeights, DraftHeadWeights


def read(
    model: Decoder, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> tuple[DraftHead, DraftHeadWeights]:
    """DFlash as its authors publish it.

    Their config counts a layer by the hidden states that leave it; here it is counted by those that
    enter. The LM head is the target's.
    """
    own = about.get("dflash_config") or {}
    ids = own.get("target_layer_ids")
    if ids is None:
        ids = default_layers(model.layers, int(about["num_hidden_layers"]))
    aux_layers = [int(i) + 1 for i in ids]
    mask = own.get("mask_token_id")
    return read_block(model, about, tensors, aux_layers, mask, about["block_size"])


def default_layers(layers: int, drafting: int) -> list[int]:
    """Which of a target's layers are read if the config does not say: evenly spaced from 1 on."""
    if drafting == 1:
        return [layers // 2]
    return [round(1 + i * (layers - 4) / (drafting - 1)) for i in range(drafting)]


def read_block(
    model: Decoder,
    about: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    aux_layers: list[int],
    mask: int | None,
    block: int,
) -> tuple[DraftHead, DraftHeadWeights]:
    """about: the config of its layers. aux_layers: the layers whose input hidden states it reads."""
    config = model.config
    if mask is None:
        raise CorruptModel("the config does not name a mask_token_id")
    shape, read = shape_of(about, config), checked_aux_layers(aux_layers, config)
    size, wide = config.hidden_size, len(read) * config.hidden_size
    vocabulary, lm_head = vocabulary_of(tensors, config)
    weights = BlockDrafterWeights(
        aux_layers=read,
        aux_norm=torch.ones(wide),
        fusion=shaped(tensors, "fc.weight", (size, wide)),
        fusion_norm=shaped(tensors, "hidden_norm.weight", (size,)),
        layers=[
            layer(tensors, f"layers.{i}.", config, inner=shape.inner) for i in range(shape.layers)
        ],
        norm=shaped(tensors, "norm.weight", (size,)),
        vocabulary=vocabulary,
        lm_head=lm_head,
        rope=shape.rope,
    )
    head = BlockDraftHead(
        kind="block-drafter",
        block=int(block),
        mask=int(mask),
        bigram=BigramTable.zeros(config.vocab_size),
    )
    return head, weights
