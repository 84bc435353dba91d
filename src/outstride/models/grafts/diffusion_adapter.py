"""Adapters of our own recipe: with the gate open, a model fills in blocks of masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from outstride.core.contracts import Graft
from outstride.errors import CorruptModel, UnsupportedModel
from outstride.models.decoder import Decoder
from outstride.models.grafts.folder import shaped
from outstride.ops.contract import AdapterWeights, LowRank

KIND = "diffusion-adapter"


def attach(
    model: Decoder, name: str, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Attaches an adapter whose folder says `about` of itself and holds these tensors."""
    config = model.config
    if model.masking is not None:
        what = "has an adapter already" if model.masking.gated else "fills in masks by itself"
        raise UnsupportedModel(f"this model {what}: no other one can be attached")
    if not config.plain or config.rotary is not None:
        raise UnsupportedModel(f"adapters cannot be attached to {config.architecture} models yet")
    try:
        rank, block = int(about["rank"]), int(about["block"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptModel(f"the adapter's config.json is damaged: {error}") from error
    size, inner, count = config.hidden_size, config.intermediate_size, config.layers
    wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def joined(columns: int, **rows: int) -> list[LowRank]:
        """For each layer, what is added to matrices that share their input, as to one matrix."""
        low, high = [], []
        for i, (key, width) in enumerate(rows.items()):
            at = f"self_attn.{key}_proj" if key in "qkvo" else f"mlp.{key}_proj"
            low.append(shaped(tensors, f"{at}.low", (count * rank, columns)).view(count, rank, -1))
            part = shaped(tensors, f"{at}.high", (count * rank, width)).view(count, rank, -1)
            whole = torch.zeros(count, width, len(rows) * rank)
            whole[..., i * rank : (i + 1) * rank] = part.transpose(1, 2)
            high.append(whole)
        every = torch.cat(low, dim=1), torch.cat(high, dim=1)
        return [LowRank(a.contiguous(), b.contiguous()) for a, b in zip(*every, strict=True)]

    layers = zip(
        joined(size, q=wide, k=narrow, v=narrow),
        joined(wide, o=size),
        joined(size, gate=inner, up=inner),
        joined(inner, down=size),
        strict=True,
    )
    mask = shaped(tensors, "mask.weight", (1, size))
    masking = model.adapt(mask, block, [AdapterWeights(*parts) for parts in layers])
    nothing = np.zeros((1, 1), dtype=np.float32)
    model.grafts[name] = Graft(
        kind=KIND,
        block=block,
        mask=masking.token,
        rows=np.zeros(0, dtype=np.int64),
        before=nothing,
        after=nothing,
    )
