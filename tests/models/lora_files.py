"""Random LoRA adapters in PEFT's format, and the same adapters merged into transformers models."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from outstride.models.checkpoint_names import places
from outstride.models.config import DecoderConfig

DENSE = r".*\.(q|k|v|o|gate|up|down|qkv|gate_up)_proj"


def linear_shapes(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """[out, in] of the projections of a model's dense layers, by the names of its checkpoint."""
    shapes = config.shapes()
    return {
        name.removesuffix(".weight"): (sum(shapes[p][0] for p in parts), shapes[parts[0]][1])
        for name, parts in places(shapes, config.architecture).items()
        if re.fullmatch(DENSE, name.removesuffix(".weight"))
    }


def shapes_of(model: Any) -> dict[str, tuple[int, int]]:
    """[out, in] of the projections of a transformers model."""
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and re.fullmatch(DENSE, name)
    }


def write_lora(
    folder: Path,
    shapes: Mapping[str, tuple[int, int]],
    targets: str = DENSE,
    *,
    rank: int = 4,
    seed: int = 1,
    ranks: Mapping[str, int] | None = None,
    dtype: torch.dtype = torch.float32,
    tensors: Mapping[str, torch.Tensor | None] | None = None,
    **about: Any,
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Writes an adapter for the modules whose names match; returns A and B of each.

    ranks: of single modules. tensors: further ones; None removes one. about: entries of the config.
    """
    source = torch.Generator().manual_seed(seed)
    found, stored = {}, {}
    for name, (rows, columns) in shapes.items():
        if not re.fullmatch(targets, name):
            continue
        size = (ranks or {}).get(name, rank)
        a = (torch.randn(size, columns, generator=source) * columns**-0.5).to(dtype)
        b = (torch.randn(rows, size, generator=source) * 0.3).to(dtype)
        found[name] = a.float(), b.float()
        stored[f"base_model.model.{name}.lora_A.weight"] = a
        stored[f"base_model.model.{name}.lora_B.weight"] = b
    stored |= tensors or {}
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "the/base",
        "r": rank,
        "lora_alpha": 2 * rank,
        "bias": "none",
        "target_modules": targets,
        **about,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(kept, folder / "adapter_model.safetensors")
    return found


@torch.no_grad()
def merge(
    model: Any,
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    scales: Mapping[str, float] | float = 2.0,
) -> Any:
    """Adds scale * B · A to the weights of a transformers model, in place."""
    modules = dict(model.named_modules())
    for name, (a, b) in factors.items():
        scale = scales if isinstance(scales, float) else scales[name]
        modules[name].weight += scale * (b @ a)
    return model
