"""The config of a published drafter, checked against the model that it is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from outstride.core.graph import IntArray
from outstride.errors import CorruptModel, UnsupportedModel
from outstride.models.config import DecoderConfig
from outstride.models.draft_heads.folder import shaped
from outstride.ops.switches import RopeWeights


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """Where a drafter may differ from its model."""

    inner: int
    """The width of its MLP."""
    layers: int
    rope: RopeWeights | None
    """None: as the model's."""


def shape_of(about: Mapping[str, Any], config: DecoderConfig) -> DrafterShape:
    """Reads the config of a drafter, which is written like that of a decoder."""
    kind = about.get("model_type")
    known = kind if kind in ("llama", "qwen2", "qwen3", "mistral") else "llama"
    found = DecoderConfig.from_hf({**about, "architectures": None, "model_type": known})
    if about.get("target_hidden_size") not in (None, config.hidden_size):
        raise UnsupportedModel(
            f"this draft head is for models with hidden_size {about['target_hidden_size']}; this "
            f"model has {config.hidden_size}"
        )
    for key in ("hidden_size", "heads", "kv_heads", "head_dim", "vocab_size"):
        if getattr(found, key) != getattr(config, key):
            raise UnsupportedModel(
                f"this draft head has {key} {getattr(found, key)}; this model has "
                f"{getattr(config, key)}"
            )
    if any(kind == "sliding_attention" for kind in about.get("layer_types") or ()):
        raise UnsupportedModel("draft heads with sliding windows are not supported")
    same = found.frequencies == config.frequencies and found.rope_scale == config.rope_scale
    rope = None if same else RopeWeights(tuple(found.frequencies), found.rope_scale)
    return DrafterShape(inner=found.intermediate_size, layers=found.layers, rope=rope)


def checked_aux_layers(layers: list[int], config: DecoderConfig) -> tuple[int, ...]:
    """The layers whose input hidden states a drafter reads.

    What leaves the last layer is not among them: it is unclear whether formats mean it before or after
    the final norm.
    """
    if any(not 0 <= layer < config.layers for layer in layers) or len(set(layers)) < len(layers):
        raise UnsupportedModel(
            f"this draft head reads the hidden states that enter the layers {layers}; this model has "
            f"{config.layers} layers"
        )
    return tuple(layers)


def vocabulary_of(
    tensors: Mapping[str, torch.Tensor], config: DecoderConfig, *, own_lm_head: bool = True
) -> tuple[IntArray, torch.Tensor | None]:
    """The tokens [tokens] that a drafter can draft, rising, and its own LM head [tokens, hidden] or
    None.

    The tensor `d2t` holds the difference of each of its token ids to the model's.
    """
    listed = np.arange(config.vocab_size, dtype=np.int64)
    if "d2t" in tensors:
        offsets = tensors["d2t"].numpy().astype(np.int64)
        listed = np.arange(len(offsets), dtype=np.int64) + offsets
    if (
        len(np.unique(listed)) < len(listed)
        or listed.min() < 0
        or listed.max() >= config.vocab_size
    ):
        raise CorruptModel("the tensor 'd2t' does not lead into the vocabulary of the model")
    order = np.argsort(listed, kind="stable")
    lm_head = None
    if own_lm_head and "lm_head.weight" in tensors:
        lm_head = shaped(tensors, "lm_head.weight", (len(listed), config.hidden_size))
        lm_head = lm_head[torch.from_numpy(order)]
    return listed[order], lm_head
