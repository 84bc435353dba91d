"""Block drafters of our own recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from outstride.core.draft_heads import BigramTable, BlockDraftHead
from outstride.models.decoder import Decoder
from outstride.models.draft_heads.folder import bigram_of, layer, shaped
from outstride.ops.weights import BlockDrafterWeights


def attach(
    model: Decoder, name: str, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Attaches a block drafter with this config.json and these tensors."""
    config, aux_layers = model.config, tuple(map(int, about["taps"]))
    vocabulary = tensors["vocabulary"].numpy().astype(np.int64)
    bigram: BigramTable = bigram_of(tensors, vocabulary, config.vocab_size)
    mask = model.add_rows(shaped(tensors, "mask.weight", (1, config.hidden_size)))
    size, wide = config.hidden_size, len(aux_layers) * config.hidden_size
    model.attach_draft_head(
        name,
        BlockDraftHead(
            kind=about["outstride"], block=int(about["block"]), mask=mask, bigram=bigram
        ),
        BlockDrafterWeights(
            aux_layers=aux_layers,
            aux_norm=shaped(tensors, "taps.scale", (wide,)),
            fusion=shaped(tensors, "fc.weight", (size, wide)),
            fusion_norm=shaped(tensors, "hidden_norm.weight", (size,)),
            layers=[layer(tensors, f"layers.{i}.", config) for i in range(int(about["layers"]))],
            norm=shaped(tensors, "norm.weight", (size,)),
            vocabulary=vocabulary,
            window=about.get("window"),
            bigram=bigram,
        ),
    )
