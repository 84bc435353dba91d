"""Makes `compressed.safetensors`: matrices in every packing of compressed-tensors, and their values.

Run it in an environment of its own that has the package compressed-tensors (0.20.0 made the file):
`python tests/models/golden/make_compressed.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor  # type: ignore[import-not-found]
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme  # type: ignore[import-not-found]
from compressed_tensors.quantization.utils import calculate_qparams  # type: ignore[import-not-found]
from safetensors.torch import save_file

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "int4 group": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "int4 group zeros": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False},
    ),
    "int4 channel": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
    "int4 channel zeros": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "channel", "symmetric": False},
    ),
    "int4 tensor": ("pack-quantized", {"num_bits": 4, "strategy": "tensor"}),
    "int8 packed": ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 64}),
    "int8 channel": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8 channel zeros": (
        "int-quantized",
        {"num_bits": 8, "strategy": "channel", "symmetric": False},
    ),
    "int8 tensor": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
    "fp8 tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8 channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8 block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]},
    ),
}
ROWS, COLUMNS = 24, 192


def bounds(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and largest weight of each group."""
    size = {"tensor": (ROWS, COLUMNS), "channel": (1, COLUMNS)}.get(str(args.strategy))
    if size is None:
        size = tuple(args.block_structure or (1, args.group_size or 0))
    high, wide = size
    padded = torch.nn.functional.pad(weight, (0, -COLUMNS % wide, 0, -ROWS % high))
    parts = padded.reshape(len(padded) // high, high, -1, wide)
    low, top = parts.amin(dim=(1, 3)), parts.amax(dim=(1, 3))
    return (low.reshape(1), top.reshape(1)) if high == ROWS else (low, top)


def main() -> None:
    found: dict[str, torch.Tensor] = {}
    settings: dict[str, Any] = {}
    for number, (case, (form, values)) in enumerate(CASES.items()):
        args = QuantizationArgs(**values)
        weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(number)) + 0.2
        weight = weight.to(torch.bfloat16)
        scale, zero = calculate_qparams(*bounds(weight, args), args)
        state = {"weight": weight, "weight_scale": scale.to(torch.bfloat16)}
        if not args.symmetric:
            state["weight_zero_point"] = zero
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        compressor = BaseCompressor.get_value_from_registry(form)
        parts = compressor.compress(state, scheme)
        values_of = compressor.decompress(dict(parts), scheme)["weight"]
        found |= {f"{case}/{name}": part.contiguous() for name, part in parts.items()}
        found[f"{case}/values"] = values_of.to(torch.bfloat16)
        settings[case] = {
            "quant_method": "compressed-tensors",
            "format": form,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": values}},
        }
    path = Path(__file__).parent / "compressed.safetensors"
    save_file(found, path, {"settings": json.dumps(settings)})


if __name__ == "__main__":
    main()
