"""Heads of our own recipe: on the target's last state, independent or chained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from outstride.core.contracts import Graft
from outstride.core.graph import IntArray
from outstride.models.decoder import Decoder
from outstride.models.grafts.folder import shaped
from outstride.ops.contract import HeadsWeights, HeadWeights, ResidualWeights


def graft_of(
    model: Decoder, vocabulary: IntArray, count: int, tensors: Mapping[str, torch.Tensor]
) -> Graft:
    """What is known of heads outside the model: so many of them, for these tokens."""
    rows = np.full(model.config.vocab_size, len(vocabulary), dtype=np.int64)
    rows[vocabulary] = np.arange(len(vocabulary))
    before = np.zeros((len(vocabulary) + 1, 1), dtype=np.float32)
    after = np.zeros((len(vocabulary), 1), dtype=np.float32)
    if "follow.after.weight" in tensors:
        rank = tensors["follow.after.weight"].shape[1]
        before = shaped(tensors, "follow.before.weight", (len(before), rank)).numpy()
        after = shaped(tensors, "follow.after.weight", (len(after), rank)).numpy()
    return Graft(kind="heads", block=count + 1, mask=-1, rows=rows, before=before, after=after)


def attach(
    model: Decoder, name: str, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Attaches heads whose folder says `about` of itself and holds these tensors."""
    size, inner, count = model.config.hidden_size, int(about["inner"]), int(about["heads"])
    chained = bool(about["chained"])
    listed = tensors["vocabulary"].numpy().astype(np.int64)

    def head(i: int) -> HeadWeights:
        at = f"heads.{i}."
        block = ResidualWeights(
            norm=shaped(tensors, f"{at}norm.weight", (size,)),
            enter=shaped(tensors, f"{at}enter.weight", (inner, (1 + chained) * size)),
            bias=None,
            leave=shaped(tensors, f"{at}leave.weight", (size, inner)),
        )
        return HeadWeights([block], norm=shaped(tensors, f"{at}last.weight", (size,)))

    weights = HeadsWeights(
        tap=model.layers,
        entry=None,
        token=shaped(tensors, "token.weight", (size,)) if chained else None,
        heads=[head(i) for i in range(count)],
        vocabulary=listed,
    )
    graft = graft_of(model, listed, count, tensors)
    model.attach_heads(name, replace(graft, chained=chained), weights)
