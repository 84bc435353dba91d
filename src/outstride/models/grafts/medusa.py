"""Medusa heads: residual blocks and a matrix of scores for each position ahead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from outstride.core.contracts import Graft
from outstride.errors import CorruptModel
from outstride.models.decoder import Decoder
from outstride.models.grafts import heads
from outstride.models.grafts.folder import shaped
from outstride.ops.contract import HeadsWeights, HeadWeights, ResidualWeights


def read(
    model: Decoder, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> tuple[Graft, HeadsWeights]:
    """Heads on the state under the final norm; each block is x + silu(linear(x)).

    The config counts blocks; heads are counted by what is there, for published configs are known to
    say less.
    """
    size, words = model.config.hidden_size, model.config.vocab_size
    blocks = int(about.get("medusa_num_layers", 1))
    known = {key.removeprefix("medusa_head."): tensors[key] for key in tensors}
    count = 0
    while f"{count}.{blocks}.weight" in known:
        count += 1
    if not count:
        raise CorruptModel(f"the tensor '0.{blocks}.weight' is missing")

    def head(i: int) -> HeadWeights:
        found = [
            ResidualWeights(
                norm=None,
                enter=shaped(known, f"{i}.{j}.linear.weight", (size, size)),
                bias=shaped(known, f"{i}.{j}.linear.bias", (size,)),
                leave=None,
            )
            for j in range(blocks)
        ]
        return HeadWeights(found, None, shaped(known, f"{i}.{blocks}.weight", (words, size)))

    vocabulary = np.arange(words, dtype=np.int64)
    weights = HeadsWeights(
        tap=model.layers,
        entry=model.ops.final_norm(),
        token=None,
        heads=[head(i) for i in range(count)],
        vocabulary=vocabulary,
    )
    return heads.graft_of(model, vocabulary, count, {}), weights
