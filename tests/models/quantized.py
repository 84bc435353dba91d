"""Tiny checkpoints in the packings of FP8, GPTQ and AWQ, written code by code."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import safetensors.torch
import torch

from tests.models.checkpoints import make, save

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "initializer_range": 0.06,
}
Parts: TypeAlias = dict[str, torch.Tensor]
Pack: TypeAlias = Callable[[torch.Tensor], tuple[Parts, torch.Tensor]]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def checkpoint(
    folder: Path,
    pack: Pack,
    settings: Mapping[str, Any] | None,
    *,
    keep: tuple[str, ...] = ("lm_head", "embed_tokens"),
    variant: str = "llama",
) -> tuple[Path, Any]:
    """A checkpoint whose matrices are packed, and the model of transformers with their values."""
    model = make(variant, **SIZES)
    save(model, folder)
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    values = {}
    for name, tensor in list(tensors.items()):
        if tensor.ndim == 2 and not any(part in name for part in keep):
            module = name.removesuffix(".weight")
            parts, values[name] = pack(tensors.pop(name))
            tensors |= {f"{module}.{part}": stored for part, stored in parts.items()}
    safetensors.torch.save_file(tensors, path)
    with torch.no_grad():
        for name, value in values.items():
            model.get_parameter(name).copy_(value)
    if settings is not None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = settings
        (folder / "config.json").write_text(json.dumps(config))
    return folder, model


def words(codes: list[int], bits: int, order: tuple[int, ...] | None = None) -> list[int]:
    """Codes as signed 32-bit words; the first of each word, in this order, has the lowest bits."""
    per_word, found = 32 // bits, []
    for start in range(0, len(codes), per_word):
        some = codes[start : start + per_word] + [0] * per_word
        word = 0
        for place, at in enumerate(order or range(per_word)):
            word |= some[at] << (bits * place)
        found.append(word - (1 << 32) if word >= 1 << 31 else word)
    return found


def grid(
    weight: torch.Tensor, bits: int, groups: torch.Tensor, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [rows, columns], zeros and scales [rows, groups] (half precision) of columns in groups."""
    rows, top = len(weight), (1 << bits) - 1
    count = int(groups.max()) + 1
    scales, zeros = torch.empty(rows, count), torch.empty(rows, count)
    for group in range(count):
        some = weight[:, groups == group]
        low, high = some.amin(1).clamp(max=0), some.amax(1).clamp(min=0)
        step = 2 * some.abs().amax(1) / top if symmetric else (high - low) / top
        scales[:, group] = step.to(torch.float16).to(torch.float32)
        zeros[:, group] = (top + 1) // 2 if symmetric else (-low / scales[:, group]).round()
    zeros = zeros.clamp(1, top)
    codes = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, top)
    return codes, zeros, scales


def gptq(
    bits: int = 4,
    group: int = 64,
    *,
    symmetric: bool = False,
    shuffled: bool = False,
    version: int = 1,
    with_groups: bool = True,
) -> Pack:
    """The packing of GPTQ; values are computed here, weight by weight."""

    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        columns = weight.shape[1]
        groups = torch.arange(columns) // group
        if shuffled:
            groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(0))]
        codes, zeros, scales = grid(weight, bits, groups, symmetric)
        values = (codes - zeros[:, groups]) * scales[:, groups]
        down = [words(row, bits) for row in codes.int().tolist()]
        stored = (zeros - int(version == 1)).int().T.tolist()
        parts = {
            "qweight": torch.tensor(down, dtype=torch.int32).T.contiguous(),
            "qzeros": torch.tensor([words(row, bits) for row in stored], dtype=torch.int32),
            "scales": scales.T.to(torch.float16).contiguous(),
        }
        if with_groups:
            parts["g_idx"] = groups.int()
        return parts, values

    return pack


def awq(group: int = 64) -> Pack:
    """The packing of AWQ's GEMM kernels."""

    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        groups = torch.arange(weight.shape[1]) // group
        codes, zeros, scales = grid(weight, 4, groups, symmetric=False)
        values = (codes - zeros[:, groups]) * scales[:, groups]

        def packed(numbers: torch.Tensor) -> torch.Tensor:
            lines = [words(line, 4, AWQ_ORDER) for line in numbers.T.int().tolist()]
            return torch.tensor(lines, dtype=torch.int32)

        parts = {"qweight": packed(codes), "qzeros": packed(zeros)}
        return {**parts, "scales": scales.T.to(torch.float16).contiguous()}, values

    return pack


def fp8(high: int, wide: int, scale_name: str = "weight_scale_inv", **more: torch.Tensor) -> Pack:
    """FP8 with a factor for every block of high x wide weights; 0 stands for the whole side."""

    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        rows, columns = weight.shape
        tall, broad = high or rows, wide or columns
        scale = torch.empty(-(-rows // tall), -(-columns // broad))
        codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        values = torch.empty(rows, columns)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                at = slice(i * tall, (i + 1) * tall), slice(j * broad, (j + 1) * broad)
                scale[i, j] = weight[at].abs().max() / 448
                codes[at] = (weight[at] / scale[i, j]).to(torch.float8_e4m3fn)
                values[at] = codes[at].to(torch.float32) * scale[i, j]
        stored = scale.reshape(()) if not high and not wide else scale
        return {
            "weight": codes,
            scale_name: stored,
            **{n: t.clone() for n, t in more.items()},
        }, values

    return pack
