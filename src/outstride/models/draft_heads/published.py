"""Drafters that others have published, in their own formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from outstride.core.draft_heads import DraftHead
from outstride.errors import CorruptModel, UnsupportedModel
from outstride.models.decoder import Decoder
from outstride.models.draft_heads import dflash, eagle, medusa, speculators
from outstride.models.draft_heads.folder import read_tensors
from outstride.ops.weights import DraftHeadWeights

Tensors = Mapping[str, torch.Tensor]
Read = Callable[[Decoder, Mapping[str, Any], Tensors], tuple[DraftHead, DraftHeadWeights]]

COPIES = (
    "embed_tokens.weight",
    "lm_head.weight",
    "t2d",
    "verifier_lm_head.weight",
    "verifier_norm.weight",
)
"""Tensors that folders carry although the target's own are used."""


class TrackedTensors(dict[str, torch.Tensor]):
    """Tensors that record which of them were read."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.used.add(name)
        return super().__getitem__(name)


def read(model: Decoder, folder: Path, about: Mapping[str, Any]) -> Callable[[str], None]:
    """A published drafter; the result attaches it under a name. An unused tensor is an error."""
    found = read_tensors(folder)
    tensors = TrackedTensors(
        {key: tensor for key, tensor in found.items() if not key.endswith("rotary_emb.inv_freq")}
    )
    head, weights = _format(folder, about, tensors)(model, about, tensors)
    unused = [key for key in tensors if key not in tensors.used | set(COPIES)]
    if unused:
        raise CorruptModel(
            f"the tensor {sorted(unused)[0]!r} in {folder} has no place in the draft head"
        )
    packed = model.pack_draft_head(weights)
    return lambda name: model.attach_draft_head(name, head, weights, packed)


def _format(folder: Path, about: Mapping[str, Any], tensors: Tensors) -> Read:
    """By the config, or by the tensors of formats whose config does not name them."""
    if "speculators_model_type" in about:
        return speculators.read
    if "dflash_config" in about:
        return dflash.read
    if "medusa_num_heads" in about:
        return medusa.read
    if "midlayer.self_attn.q_proj.weight" in tensors:
        return eagle.read_third
    if "fc.weight" in tensors and "layers.0.self_attn.q_proj.weight" in tensors:
        return eagle.read_first
    raise UnsupportedModel(
        f"{folder} holds no known drafter; supported are those of `outstride train`, DFlash, EAGLE, "
        "EAGLE-3, Medusa heads, and the speculators format"
    )
