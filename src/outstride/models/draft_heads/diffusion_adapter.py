"""LoRA adapters of our own recipe, with which a causal model fills in blocks of masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outstride.core.draft_heads import DraftHead
from outstride.errors import CorruptModel, UnsupportedModel
from outstride.models.decoder import Decoder
from outstride.models.draft_heads.folder import shaped
from outstride.ops.weights import AdapterWeights, LoraWeights, unusual_layers

KIND = "diffusion-adapter"


def attach(
    model: Decoder, name: str, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Attaches an adapter with this config.json and these tensors."""
    config = model.config
    if model.masked_spec is not None:
        what = (
            "has an adapter already"
            if model.masked_spec.uses_adapter
            else "fills in masks by itself"
        )
        raise UnsupportedModel(f"this model {what}: no further adapter can be attached")
    if unusual_layers(config) or config.rotary is not None:
        raise UnsupportedModel(f"adapters cannot be attached to {config.architecture} models yet")
    try:
        rank, block = int(about["rank"]), int(about["block"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptModel(f"the adapter's config.json is damaged: {error}") from error
    size, inner, count = config.hidden_size, config.intermediate_size, config.layers
    wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def joined(columns: int, **rows: int) -> list[LoraWeights]:
        """For each layer, one adapter for all matrices that share their input of `columns`.

        rows: the outputs of each matrix; their parts of `b` are blocks on the diagonal.
        """
        a, b = [], []
        for i, (key, width) in enumerate(rows.items()):
            at = f"self_attn.{key}_proj" if key in "qkvo" else f"mlp.{key}_proj"
            a.append(shaped(tensors, f"{at}.low", (count * rank, columns)).view(count, rank, -1))
            own = shaped(tensors, f"{at}.high", (count * rank, width)).view(count, rank, -1)
            padded = torch.zeros(count, width, len(rows) * rank)
            padded[..., i * rank : (i + 1) * rank] = own.transpose(1, 2)
            b.append(padded)
        layers = zip(torch.cat(a, dim=1), torch.cat(b, dim=1), strict=True)
        return [LoraWeights(one.contiguous(), other.contiguous()) for one, other in layers]

    layers = zip(
        joined(size, q=wide, k=narrow, v=narrow),
        joined(wide, o=size),
        joined(size, gate=inner, up=inner),
        joined(inner, down=size),
        strict=True,
    )
    mask = shaped(tensors, "mask.weight", (1, size))
    model.attach_diffusion_adapter(mask, block, [AdapterWeights(*products) for products in layers])
    model.draft_heads[name] = DraftHead(kind=KIND, block=block)
