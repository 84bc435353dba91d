"""Drafters that others have published, in their own formats: which one a folder holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from outstride.core.contracts import Graft
from outstride.errors import CorruptModel, UnsupportedModel
from outstride.models.decoder import Decoder
from outstride.models.grafts import dflash, eagle, medusa, speculators
from outstride.models.grafts.folder import read_tensors
from outstride.ops.contract import GraftWeights, HeadsWeights

Tensors = Mapping[str, torch.Tensor]
Read = Callable[
    [Decoder, Mapping[str, Any], Tensors], tuple[Graft, GraftWeights] | tuple[Graft, HeadsWeights]
]

COPIES = (
    "embed_tokens.weight",
    "lm_head.weight",
    "t2d",
    "verifier_lm_head.weight",
    "verifier_norm.weight",
)
"""What folders carry along where the target's own is used."""


class Watched(dict[str, torch.Tensor]):
    """Tensors that remember which of them were looked at."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.seen: set[str] = set()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.seen.add(name)
        return super().__getitem__(name)


def attach(model: Decoder, name: str, folder: Path, about: Mapping[str, Any]) -> None:
    """Attaches a published drafter; a tensor that has no place in it is an error."""
    found = read_tensors(folder)
    tensors = Watched({k: t for k, t in found.items() if not k.endswith("rotary_emb.inv_freq")})
    graft, weights = _format(folder, about, tensors)(model, about, tensors)
    left = [key for key in tensors if key not in tensors.seen | set(COPIES)]
    if left:
        raise CorruptModel(f"the tensor {sorted(left)[0]!r} in {folder} has no place in the part")
    if isinstance(weights, HeadsWeights):
        model.attach_heads(name, graft, weights)
    else:
        model.attach(name, graft, weights)


def _format(folder: Path, about: Mapping[str, Any], tensors: Tensors) -> Read:
    """By what the config says, or by tensors where configs say nothing of it."""
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
        f"{folder} holds no drafter that is known here: those of `outstride train`, DFlash, EAGLE, "
        "EAGLE-3, Medusa heads, and the speculators format"
    )
