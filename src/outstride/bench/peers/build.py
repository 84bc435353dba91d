"""How to build llama.cpp for this processor, or for one of its instruction sets.

`OUTSTRIDE_ISA` forces an instruction set of our kernels. A comparison is fair if llama.cpp is built
for the same one, so each such build has an environment of its own (`make llama ISA=avx2`).
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

_OPTIONS = {
    "GGML_SSE42": ("sse4_2",),
    "GGML_AVX": ("avx",),
    "GGML_AVX2": ("avx2",),
    "GGML_BMI2": ("bmi2",),
    "GGML_FMA": ("fma",),
    "GGML_F16C": ("f16c",),
    "GGML_AVX_VNNI": ("avx_vnni",),
    "GGML_AVX512": ("avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"),
    "GGML_AVX512_VBMI": ("avx512vbmi",),
    "GGML_AVX512_VNNI": ("avx512_vnni",),
}
_AVX2 = ("GGML_SSE42", "GGML_AVX", "GGML_AVX2", "GGML_BMI2", "GGML_FMA", "GGML_F16C")
_LIMITS: dict[str, tuple[str, ...]] = {
    "portable": (),
    "avx2": _AVX2,
    "avx-vnni": (*_AVX2, "GGML_AVX_VNNI"),
}
"""Options that a build for an instruction set may use; other sets have no build of their own."""


def build_options(machine: str, cpuinfo: str, isa: str | None = None) -> list[str]:
    """CMake options for this processor, or for one of its instruction sets.

    A native build uses all instructions that the processor announces. Virtual machines may announce
    AMX without permitting it, and such a build crashes in its first pass. So on x86 every useful
    option is named, and AMX is not. AVX-VNNI is left out where AVX-512 has the same instructions.
    """
    if machine.lower() not in ("x86_64", "amd64"):
        return ["-DGGML_NATIVE=ON"]
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    flags = next((set(rest.split()) for name, _, rest in lines if name.strip() == "flags"), set())
    if not flags:
        return ["-DGGML_NATIVE=ON"]
    has = {option: flags.issuperset(needed) for option, needed in _OPTIONS.items()}
    for option in has:
        if option.startswith("GGML_AVX512"):
            has[option] &= has["GGML_AVX512"]
    allowed = _LIMITS.get(isa or "", tuple(_OPTIONS))
    has = {option: on and option in allowed for option, on in has.items()}
    has["GGML_AVX_VNNI"] &= not has["GGML_AVX512"]
    return ["-DGGML_NATIVE=OFF", *(f"-D{o}={'ON' if on else 'OFF'}" for o, on in has.items())]


def this_machine(isa: str | None = None) -> list[str]:
    """CMake options for the processor of this machine."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        cpuinfo = ""
    return build_options(platform.machine(), cpuinfo, isa)


def forced_isa() -> str | None:
    """The instruction set that our kernels are forced to, if any."""
    return os.environ.get("OUTSTRIDE_ISA") or None


def own_environment(isa: str | None) -> str | None:
    """Name of the environment of llama.cpp's build for an instruction set; None: there is none."""
    return f"llama-{isa}" if isa in _LIMITS else None
