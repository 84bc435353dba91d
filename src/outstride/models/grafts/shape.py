"""What a published drafter's config says, held against the model that it is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from outstride.core.contracts import Graft
from outstride.core.graph import IntArray
from outstride.errors import CorruptModel, UnsupportedModel
from outstride.models.config import DecoderConfig
from outstride.models.grafts.folder import shaped


@dataclass(frozen=True, slots=True)
class PartShape:
    """Where a part may differ from its model: the width of its MLP, how far heads turn, layers."""

    inner: int
    layers: int
    frequencies: tuple[float, ...] | None
    rope_scale: float


def shape_of(about: Mapping[str, Any], config: DecoderConfig) -> PartShape:
    """Reads the config of a part, written as that of a decoder."""
    kind = about.get("model_type")
    known = kind if kind in ("llama", "qwen2", "qwen3", "mistral") else "llama"
    found = DecoderConfig.from_hf({**about, "architectures": None, "model_type": known})
    if about.get("target_hidden_size") not in (None, config.hidden_size):
        raise UnsupportedModel(
            f"this part is for models with hidden_size {about['target_hidden_size']}; this model "
            f"has {config.hidden_size}"
        )
    for key in ("hidden_size", "heads", "kv_heads", "head_dim", "vocab_size"):
        if getattr(found, key) != getattr(config, key):
            raise UnsupportedModel(
                f"this part has {key} {getattr(found, key)}; this model has {getattr(config, key)}"
            )
    if any(kind == "sliding_attention" for kind in about.get("layer_types") or ()):
        raise UnsupportedModel("parts with sliding windows are not supported")
    same = found.frequencies == config.frequencies and found.rope_scale == config.rope_scale
    return PartShape(
        inner=found.intermediate_size,
        layers=found.layers,
        frequencies=None if same else tuple(found.frequencies),
        rope_scale=found.rope_scale,
    )


def checked_taps(taps: list[int], config: DecoderConfig) -> tuple[int, ...]:
    """Layers that a part reads; `layers` itself is not among them, where norms are at issue."""
    if any(not 0 <= tap < config.layers for tap in taps) or len(set(taps)) < len(taps):
        raise UnsupportedModel(
            f"this part reads the states that enter the layers {taps}; this model has "
            f"{config.layers} layers"
        )
    return tuple(taps)


def vocabulary_of(
    tensors: Mapping[str, torch.Tensor], config: DecoderConfig, *, own_head: bool = True
) -> tuple[IntArray, torch.Tensor | None]:
    """The tokens that a part can guess in rising order, and its head if it has its own.

    `d2t` says how far each of its tokens is from that of the model.
    """
    listed = np.arange(config.vocab_size, dtype=np.int64)
    if "d2t" in tensors:
        far = tensors["d2t"].numpy().astype(np.int64)
        listed = np.arange(len(far), dtype=np.int64) + far
    if (
        len(np.unique(listed)) < len(listed)
        or listed.min() < 0
        or listed.max() >= config.vocab_size
    ):
        raise CorruptModel("the tensor 'd2t' does not lead into the vocabulary of the model")
    order = np.argsort(listed, kind="stable")
    head = None
    if own_head and "lm_head.weight" in tensors:
        head = shaped(tensors, "lm_head.weight", (len(listed), config.hidden_size))
        head = head[torch.from_numpy(order)]
    return listed[order], head


def graft_of(
    kind: str, config: DecoderConfig, block: int, mask: int = -1, *, chained: bool = False
) -> Graft:
    """A part that knows no correction by the token in front."""
    none = np.zeros((1, 1), dtype=np.float32)
    rows = np.zeros(config.vocab_size, dtype=np.int64)
    return Graft(
        kind=kind, block=block, mask=mask, rows=rows, before=none, after=none, chained=chained
    )
