"""Medusa heads as published: residual blocks and an LM head for each position ahead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from outstride.core.draft_heads import BigramTable, DraftHead, MedusaDraftHead
from outstride.errors import CorruptModel
from outstride.models.decoder import Decoder
from outstride.models.draft_heads.folder import shaped
from outstride.ops.weights import (
    DraftHeadWeights,
    MedusaHeadWeights,
    MedusaWeights,
    ResidualWeights,
)


def read(
    model: Decoder, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> tuple[DraftHead, DraftHeadWeights]:
    """Heads on the hidden state after the final norm; each block is x + silu(linear(x)).

    The number of blocks is in the config. Heads are counted by their tensors: published configs are
    known to state fewer than there are.
    """
    size, vocab_size = model.config.hidden_size, model.config.vocab_size
    blocks = int(about.get("medusa_num_layers", 1))
    known = {key.removeprefix("medusa_head."): tensors[key] for key in tensors}
    count = 0
    while f"{count}.{blocks}.weight" in known:
        count += 1
    if not count:
        raise CorruptModel(f"the tensor '0.{blocks}.weight' is missing")

    def head(i: int) -> MedusaHeadWeights:
        residual = [
            ResidualWeights(
                norm=None,
                up=shaped(known, f"{i}.{j}.linear.weight", (size, size)),
                bias=shaped(known, f"{i}.{j}.linear.bias", (size,)),
                down=None,
            )
            for j in range(blocks)
        ]
        lm_head = shaped(known, f"{i}.{blocks}.weight", (vocab_size, size))
        return MedusaHeadWeights(residual, None, lm_head)

    weights = MedusaWeights(
        layer=model.layers,
        hidden_norm=model.ops.draft_heads.final_norm(),
        token_norm=None,
        heads=[head(i) for i in range(count)],
        vocabulary=np.arange(vocab_size, dtype=np.int64),
    )
    bigram = BigramTable.zeros(vocab_size)
    return MedusaDraftHead(kind="heads", block=count + 1, bigram=bigram), weights
