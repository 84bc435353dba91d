"""Block drafters of our own recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from outstride.core.draft_heads import BigramTable, BlockDraftHead
from outstride.models.decoder import Decoder
from outstride.models.draft_heads.folder import bigram_of, layer, shaped
from outstride.ops.weights import BlockDrafterWeights


def read(
    model: Decoder, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> Callable[[str], None]:
    """A block drafter with this config.json and these tensors; the result attaches it under a name."""
    config, aux_layers = model.config, tuple(map(int, about["taps"]))
    vocabulary = tensors["vocabulary"].numpy().astype(np.int64)
    bigram: BigramTable = bigram_of(tensors, vocabulary, config.vocab_size)
    mask = shaped(tensors, "mask.weight", (1, config.hidden_size))
    size, wide = config.hidden_size, len(aux_layers) * config.hidden_size
    weights = BlockDrafterWeights(
        aux_layers=aux_layers,
        aux_norm=shaped(tensors, "taps.scale", (wide,)),
        fusion=shaped(tensors, "fc.weight", (size, wide)),
        fusion_norm=shaped(tensors, "hidden_norm.weight", (size,)),
        layers=[layer(tensors, f"layers.{i}.", config) for i in range(int(about["layers"]))],
        norm=shaped(tensors, "norm.weight", (size,)),
        vocabulary=vocabulary,
        window=about.get("window"),
        bigram=bigram,
    )
    packed = model.pack_draft_head(weights)
    kind, block = about["outstride"], int(about["block"])

    def attach(name: str) -> None:
        head = BlockDraftHead(kind=kind, block=block, mask=model.add_rows(mask), bigram=bigram)
        model.attach_draft_head(name, head, weights, packed)

    return attach
