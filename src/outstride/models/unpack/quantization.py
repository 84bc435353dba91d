"""Which method a checkpoint is quantized with, and the tensors that its parts describe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from outstride.errors import CorruptModel, UnsupportedModel
from outstride.models.stored import StoredTensor
from outstride.models.tokenizer import read_json
from outstride.models.unpack import awq, compressed, fp8, gptq, mxfp4

Unpack: TypeAlias = Callable[[str, Mapping[str, torch.Tensor], Mapping[str, Any]], StoredTensor]
Tensors: TypeAlias = Mapping[str, torch.Tensor]

METHODS: dict[str, tuple[Unpack, tuple[str, ...]]] = {
    "fp8": (fp8.unpack, fp8.PARTS),
    "fbgemm_fp8": (fp8.unpack, fp8.PARTS),
    "gptq": (gptq.unpack, gptq.PARTS),
    "awq": (awq.unpack, awq.PARTS),
    "compressed-tensors": (compressed.unpack, compressed.PARTS),
    "mxfp4": (fp8.unpack, ()),
}
"""Methods by `quant_method`: the function that reads a module, and the names of its parts."""
_SUPPORTED = "FP8, GPTQ, AWQ, compressed-tensors and MXFP4"
_OTHER_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Where older tools of GPTQ and AWQ state what newer ones write into config.json."""
_STRAY = {
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    ".weight_scale": "FP8 or compressed-tensors",
    ".weight_scale_inv": "FP8",
    ".weight_scale_2": "NVFP4 (modelopt)",
    ".SCB": "bitsandbytes",
    ".weight.absmax": "bitsandbytes",
    ".weight.quant_map": "bitsandbytes",
    ".W_q": "HQQ",
    mxfp4.BLOCKS: "MXFP4",
    mxfp4.SCALES: "MXFP4",
}
"""Ends of names that only quantized checkpoints have, and the methods that use them."""
_CACHE_SCALES = (
    *(".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".k_zero_point", ".v_zero_point"),
    *(".prob_output_scale", ".output_scale", ".output_zero_point"),
)
_INSTEAD = (
    "get the repository that it was made from, a GGUF file of the model, or a checkpoint in "
    f"{_SUPPORTED}"
)
_ADVICE = {
    "bitsandbytes": "load it with transformers, call model.dequantize() and save it, or "
    f"{_INSTEAD}",
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """method: one of METHODS. settings: what the checkpoint states about it."""

    method: str
    settings: Mapping[str, Any]


def quantization_of(folder: Path, config: Mapping[str, Any]) -> Quantization | None:
    """The method of a checkpoint; None: it is not quantized. An unknown one is an error."""
    text = config.get("text_config")
    nested = text.get("quantization_config") if isinstance(text, Mapping) else None
    settings = config.get("quantization_config") or config.get("compression_config") or nested
    method = None
    if not settings:
        for file, kind in _OTHER_FILES.items():
            if (folder / file).is_file():
                settings, method = read_json(folder / file), kind
                break
        else:
            return None
    if not isinstance(settings, Mapping):
        raise CorruptModel(f"{folder}: quantization_config is not an object")
    found = _method(settings, method)
    if found not in METHODS:
        advice = _ADVICE.get(found, _INSTEAD)
        raise UnsupportedModel(
            f"{folder} is quantized with {found!r}, which is not supported (supported are "
            f"{_SUPPORTED}): {advice}"
        )
    if found == "compressed-tensors":
        compressed.check_formats(settings)
    return Quantization(found, settings)


def _method(settings: Mapping[str, Any], default: str | None) -> str:
    """The name of a method, as METHODS or an error message lists it."""
    stated = str(settings.get("quant_method") or default or "an unnamed method")
    if stated == "bitsandbytes" or settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    if stated == "modelopt":
        algorithm = str(settings.get("quant_algo") or "unknown")
        return "fp8" if algorithm == "FP8" else f"modelopt ({algorithm})"
    if stated == "an unnamed method" and "config_groups" in settings:
        return "compressed-tensors"
    return stated


def unpacked(
    tensors: Tensors, quantization: Quantization | None
) -> dict[str, torch.Tensor | StoredTensor]:
    """All tensors of a checkpoint by the names of their plain versions, quantized ones by rows.

    Scales of the KV cache and of activations are left out, with a notice for the former: the KV cache
    here has scales of its own.
    """
    if quantization is None:
        _refuse_stray(tensors)
        return dict(tensors)
    found: dict[str, torch.Tensor | StoredTensor] = {}
    modules: dict[str, dict[str, torch.Tensor]] = {}
    unpack, names = METHODS[quantization.method]
    ignored = 0
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if name.endswith(_CACHE_SCALES):
            ignored += 1
        elif part in fp8.IGNORED:
            continue
        elif quantization.method == "mxfp4" and name.endswith(mxfp4.BLOCKS):
            plain = name.removesuffix(mxfp4.BLOCKS)
            if (scales := tensors.get(plain + mxfp4.SCALES)) is None:
                raise CorruptModel(f"the tensor {plain + mxfp4.SCALES!r} is missing")
            found |= mxfp4.unpack(plain, tensor, scales)
        elif quantization.method == "mxfp4" and name.endswith(mxfp4.SCALES):
            continue
        elif part in names:
            modules.setdefault(module, {})[part] = tensor
        else:
            found[name] = tensor
    for module, parts in modules.items():
        plain = f"{module}.weight"
        if set(parts) == {"weight"} and not fp8.is_fp8(parts["weight"]):
            found[plain] = parts["weight"]  # one of `ignore` or `modules_to_not_convert`
        else:
            found[plain] = _checked(unpack, plain, parts, quantization.settings)
    if ignored:
        print(
            f"note: {ignored} scales of a quantized KV cache are ignored: the KV cache here computes "
            "its own",
            file=sys.stderr,
            flush=True,
        )
    return found


def _checked(
    unpack: Unpack, name: str, parts: Tensors, settings: Mapping[str, Any]
) -> StoredTensor:
    """The tensor that parts describe; types and shapes that no code expects are errors that name it."""
    try:
        return unpack(name, parts, settings)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CorruptModel(f"the quantized tensor {name!r} is damaged: {error}") from error


def _refuse_stray(tensors: Tensors) -> None:
    """An error if there are parts of quantized tensors, but no config that says how to read them."""
    for name in tensors:
        for end, method in _STRAY.items():
            if name.endswith(end):
                raise UnsupportedModel(
                    f"the tensor {name!r} belongs to a quantized checkpoint ({method}), but "
                    "config.json has no quantization_config: get config.json of the same repository "
                    "(older ones of GPTQ state it in quantize_config.json)"
                )
