"""Which device a model runs on and in which format its weights are, by a table and never by timing.

`device` and `weights` are two options. `auto` for `device` takes a GPU that works, else the CPU.
`auto` for `weights` follows from the device, the kind of processor and the format of the model file
(`AUTO_WEIGHTS`). An explicit value is taken as it is, or refused with the reason.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from outstride.errors import InvalidParams, UnsupportedModel

if TYPE_CHECKING:
    from outstride.models.config import DecoderConfig
    from outstride.ops.contract import Ops

DEVICES = ("auto", "cpu", "cuda")
WEIGHTS = ("auto", "fp32", "bf16", "int8", "int4")
FORMATS = {"cuda": ("bf16",), "cpu": ("fp32", "int8", "int4")}
"""The weights that each device computes in. `auto` tries the devices in this order."""

GPU, AVX2, KERNELS, TORCH = "NVIDIA GPU", "AVX2", "other native kernels", "no native kernels"
GGUF_4BIT, GGUF = "GGUF, 4-bit", "GGUF"
SAFETENSORS_4BIT, SAFETENSORS = "safetensors, 4-bit", "safetensors"
AUTO_WEIGHTS = {
    ("cuda", GPU, GGUF_4BIT): "bf16",
    ("cuda", GPU, GGUF): "bf16",
    ("cuda", GPU, SAFETENSORS_4BIT): "bf16",
    ("cuda", GPU, SAFETENSORS): "bf16",
    ("cpu", AVX2, GGUF_4BIT): "int4",
    ("cpu", AVX2, GGUF): "int8",
    ("cpu", AVX2, SAFETENSORS_4BIT): "int4",
    ("cpu", AVX2, SAFETENSORS): "int8",
    ("cpu", KERNELS, GGUF_4BIT): "int8",
    ("cpu", KERNELS, GGUF): "int8",
    ("cpu", KERNELS, SAFETENSORS_4BIT): "int8",
    ("cpu", KERNELS, SAFETENSORS): "int8",
    ("cpu", TORCH, GGUF_4BIT): "fp32",
    ("cpu", TORCH, GGUF): "fp32",
    ("cpu", TORCH, SAFETENSORS_4BIT): "fp32",
    ("cpu", TORCH, SAFETENSORS): "fp32",
}
"""The weights that `auto` takes, by device, kind of processor and format of the model file.

AVX2 means the build of the kernels for processors without VNNI, or that build where OUTSTRIDE_ISA
forces it. A model file counts as 4-bit if int4 takes the codes of more than half of the weights of its
layers as they are: Q4_0, Q4_1 and Q4_K in GGUF files (thus Q4_K_M files too); GPTQ, AWQ and
compressed-tensors in groups of a multiple of 32 in safetensors. On a CPU, a model with layers that the
native kernels do not run gets fp32 instead.
"""
BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0625, "int4": 0.625}
"""Bytes that a weight takes, scales included."""


class Placement(NamedTuple):
    """A device and a weights format, both decided."""

    device: str
    weights: str


def placements(
    device: str = "auto", weights: str = "auto", file_format: str = GGUF
) -> list[Placement]:
    """What two options allow on this machine, best first; an error that says what to use if nothing.

    An explicit device or format gives one placement. Two `auto` give one for each device that works,
    and fp32 on the CPU last, which runs every model.
    """
    check_options(device, weights)
    if weights != "auto":
        return [_explicit_weights(weights)]
    found = []
    if device == "cuda" and (problem := gpu_problem()):
        raise UnsupportedModel(f"device cuda does not work here: {problem}; use device cpu or auto")
    if device == "cuda" or (device == "auto" and gpu_problem() is None):
        found.append(Placement("cuda", AUTO_WEIGHTS["cuda", GPU, file_format]))
    if device != "cuda":
        found.append(Placement("cpu", AUTO_WEIGHTS["cpu", _processor(), file_format]))
        found.append(Placement("cpu", "fp32"))
    return list(dict.fromkeys(found))


def check_options(device: str, weights: str) -> None:
    """Refuses values and combinations that no machine has; looks for no GPU."""
    if device not in DEVICES:
        raise InvalidParams(f"device is one of {', '.join(DEVICES)}; not {device!r}")
    if weights not in WEIGHTS:
        raise InvalidParams(f"weights is one of {', '.join(WEIGHTS)}; not {weights!r}")
    if "auto" not in (device, weights) and weights not in FORMATS[device]:
        here, owner = " or ".join(FORMATS[device]), _device_of(weights)
        raise UnsupportedModel(
            f"device {device} does not compute in {weights} yet: use weights {here} or auto with "
            f"device {device}, or device {owner} for weights {weights}"
        )


def _device_of(weights: str) -> str:
    return next(name for name, formats in FORMATS.items() if weights in formats)


def _explicit_weights(weights: str) -> Placement:
    """The one device that computes in this format, if it works."""
    owner = _device_of(weights)
    if owner == "cuda" and (problem := gpu_problem()):
        others = ", ".join(FORMATS["cpu"])
        raise UnsupportedModel(
            f"weights {weights} needs device cuda, which does not work here: {problem}; with device "
            f"cpu use weights {others} or auto"
        )
    if weights == "int8" and not _has_kernels():
        raise UnsupportedModel(
            "weights int8 needs the native kernels, which were not built when Outstride was "
            "installed: install a C++ compiler and install again, or use weights fp32"
        )
    return Placement(owner, weights)


def place(config: DecoderConfig, allowed: list[Placement]) -> Placement:
    """The first placement whose backend supports the model; says so where it is not the first."""
    reason = ""
    for number, placement in enumerate(allowed):
        found = backend_of(placement).supports(config)
        if found is None:
            _announce(placement, reason, automatic=len(allowed) > 1 or number > 0)
            return placement
        reason = found
    raise UnsupportedModel(
        f"{reason} ({config.architecture}); use device cpu with weights fp32, or auto for both"
    )


def _announce(placement: Placement, reason: str, *, automatic: bool) -> None:
    device, weights = placement
    kernels = _has_kernels()
    line = ""
    if reason:
        line = f"{reason}: using {device}, weights {weights}"
    elif device == "cuda" and automatic:
        line = f"using cuda:0 ({gpu_name()}), weights {weights}"
    elif weights == "int4" and not kernels:
        line = "no native kernels were built: int4 weights take the memory and time of fp32"
    elif device == "cpu" and automatic and not kernels:
        line = "no native kernels were built: using torch on the CPU, weights fp32"
    if line:
        print(line, file=sys.stderr, flush=True)


def backend_of(placement: Placement) -> type[Ops]:
    """The implementation of the operations for a placement."""
    if placement.device == "cuda":
        from outstride.ops.cuda import Cuda

        return Cuda
    if placement.weights != "fp32" and _has_kernels():
        from outstride.ops.cpu import Cpu

        return Cpu
    from outstride.ops.reference import Reference

    return Reference


def _has_kernels() -> bool:
    from outstride.ops.cpu import native

    return native.library_path() is not None


def _processor() -> str:
    """The kind of processor that passes run on, as AUTO_WEIGHTS names it."""
    from outstride.ops.cpu import native

    if not _has_kernels():
        return TORCH
    return AVX2 if native.ISAS[native.chosen_isa()] == "avx2" else KERNELS


def gpu_name() -> str:
    """The name of the first GPU."""
    import torch

    return torch.cuda.get_device_name(0)


def gpu_problem() -> str | None:
    """Why no GPU can be used; None if one works."""
    from outstride.ops.cuda import available

    if not available():
        return "torch sees no NVIDIA GPU, or Triton is not installed"
    return _tried_gpu()


@cache
def _tried_gpu() -> str | None:
    """What went wrong when the first GPU added two numbers; None if nothing did."""
    import torch

    try:
        if float((torch.ones(2, device="cuda:0") + 1).sum()) == 4.0:
            return None
        return "the GPU adds wrongly"
    except Exception as error:  # drivers and libraries fail in many ways
        return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
