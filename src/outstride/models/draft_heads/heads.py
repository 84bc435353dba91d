"""Medusa and Hydra heads of our own recipe, on the hidden state that leaves the target's last layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from outstride.core.draft_heads import BigramTable, MedusaDraftHead
from outstride.models.decoder import Decoder
from outstride.models.draft_heads.folder import bigram_of, shaped
from outstride.ops.weights import MedusaHeadWeights, MedusaWeights, ResidualWeights


def attach(
    model: Decoder, name: str, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Attaches heads with this config.json and these tensors; `chained` heads are sequential."""
    size, inner, count = model.config.hidden_size, int(about["inner"]), int(about["heads"])
    sequential, vocab_size = bool(about["chained"]), model.config.vocab_size
    vocabulary = tensors["vocabulary"].numpy().astype(np.int64)
    bigram = BigramTable.zeros(vocab_size)
    if "follow.after.weight" in tensors:
        bigram = bigram_of(tensors, vocabulary, vocab_size)

    def head(i: int) -> MedusaHeadWeights:
        at = f"heads.{i}."
        block = ResidualWeights(
            norm=shaped(tensors, f"{at}norm.weight", (size,)),
            up=shaped(tensors, f"{at}enter.weight", (inner, (1 + sequential) * size)),
            bias=None,
            down=shaped(tensors, f"{at}leave.weight", (size, inner)),
        )
        return MedusaHeadWeights([block], norm=shaped(tensors, f"{at}last.weight", (size,)))

    weights = MedusaWeights(
        layer=model.layers,
        hidden_norm=None,
        token_norm=shaped(tensors, "token.weight", (size,)) if sequential else None,
        heads=[head(i) for i in range(count)],
        vocabulary=vocabulary,
    )
    model.attach_draft_head(
        name,
        MedusaDraftHead(kind="heads", block=count + 1, bigram=bigram, sequential=sequential),
        weights,
    )
