"""The native CPU kernels: the library, its structs and its functions."""

from __future__ import annotations

import ctypes as c
import importlib.util
import os
from functools import cache
from pathlib import Path

import numpy as np

from outstride.errors import InvalidParams

_F, _I = c.c_float, c.c_int32
_P = c.c_void_p


class HadamardStruct(c.Structure):
    """A Hadamard rotation of rows. The structs of this file mirror those of kernels.cpp."""

    _fields_ = (
        ("signs", _P),
        ("factors", _P),
        ("blends", _P),
        ("run", _I),
    )


class MatrixStruct(c.Structure):
    """Packed weights."""

    _fields_ = (
        ("data", _P),
        ("scale", _P),
        ("zero", _P),
        ("bias", _P),
        ("rotation", c.POINTER(HadamardStruct)),
        ("tiles", _I),
        ("depth", _I),
        ("bits", _I),
    )


class LoraStruct(c.Structure):
    """LoRA factors of a product."""

    _fields_ = (
        ("low", _P),
        ("high", _P),
        ("parts", _P),
        ("rank", _I),
    )


NODE = np.dtype([(name, np.int32) for name in ("row", "start", "count", "direct", "pages", "tail")])


class PassStruct(c.Structure):
    """Buffers and sizes that all layers of a pass share."""

    _fields_ = (
        ("x", _P),
        ("qkv", _P),
        ("mixed", _P),
        ("middle", _P),
        ("cos", _P),
        ("sin", _P),
        ("positions", _P),
        ("slots", _P),
        ("pages", _P),
        ("tails", _P),
        ("adapter_rows", _P),
        ("low", _P),
        ("local_cos", _P),
        ("local_sin", _P),
        ("growth", _P),
        ("branch", _P),
        ("ranks", _I),
        ("rows", _I),
        ("width", _I),
        ("hidden", _I),
        ("heads_width", _I),
        ("middle_width", _I),
        ("heads", _I),
        ("kv_heads", _I),
        ("head_dim", _I),
        ("page_size", _I),
        ("eps", _F),
        ("scale", _F),
    )


class ExpertsStruct(c.Structure):
    """The mixture of experts of a layer."""

    _fields_ = (
        ("router", _P),
        ("router_bias", _P),
        ("bias", _P),
        ("shared_gate", _P),
        ("gate_up", c.POINTER(MatrixStruct)),
        ("down", c.POINTER(MatrixStruct)),
        ("count", _I),
        ("per_token", _I),
        ("sigmoid", _I),
        ("biased", _I),
        ("normalized", _I),
        ("groups", _I),
        ("groups_kept", _I),
        ("scale", _F),
        ("alpha", _F),
        ("limit", _F),
    )


class LayerStruct(c.Structure):
    """One layer: norms, matrices, KV cache."""

    _fields_ = (
        ("batch", c.POINTER(PassStruct)),
        ("nodes", c.POINTER(_P)),
        ("attention_norm", _P),
        ("query_norm", _P),
        ("key_norm", _P),
        ("mlp_norm", _P),
        ("qkv", c.POINTER(MatrixStruct)),
        ("output", c.POINTER(MatrixStruct)),
        ("gate_up", c.POINTER(MatrixStruct)),
        ("down", c.POINTER(MatrixStruct)),
        ("keys", _P),
        ("values", _P),
        ("adapters", c.POINTER(LoraStruct)),
        ("rotate", _I),
        ("wide_norms", _I),
        ("clip", _F),
        ("attention_post_norm", _P),
        ("mlp_post_norm", _P),
        ("sinks", _P),
        ("activation", _I),
        ("softcap", _F),
        ("scale", _F),
        ("experts", c.POINTER(ExpertsStruct)),
    )


BEST = np.dtype([("value", np.float32), ("token", np.int32)])


class LMHeadStruct(c.Structure):
    """The LM head: final norm, matrix, and where logits or best tokens go."""

    _fields_ = (
        ("x", _P),
        ("norm", _P),
        ("matrix", c.POINTER(MatrixStruct)),
        ("logits", _P),
        ("best", _P),
        ("rows", _I),
        ("width", _I),
        ("hidden", _I),
        ("vocabulary", _I),
        ("k", _I),
        ("eps", _F),
        ("softcap", _F),
    )


SAMPLING_SPEC = np.dtype(
    [
        ("seed", np.uint64),
        ("position", np.int64),
        ("index", np.int32),
        ("purpose", np.int32),
        ("top_k", np.int32),
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("log_min_p", np.float32),
        ("top_p", np.float64),
    ],
    align=True,
)


class SampleStruct(c.Structure):
    """Sampling from rows of logits."""

    _fields_ = (
        ("logits", _P),
        ("specs", _P),
        ("scaled", _P),
        ("scratch", _P),
        ("out", _P),
        ("rows", _I),
        ("stride", _I),
        ("vocabulary", _I),
        ("k", _I),
    )


MAX_BEST = 64
"""How many tokens native code can return for a node."""
MAX_FUSED = 16
"""How many of them without rows of logits, at temperature 0."""
ISAS = (
    "portable",
    "avx2",
    "avx-vnni",
    "avx512-vnni",
    "amx",
    "neon-dotprod",
    "neon-i8mm",
)
"""The builds of the kernels, numbered as in kernels.cpp. All of them give the same bits."""


def library_path() -> Path | None:
    """The compiled library, if the package was installed with a compiler at hand.

    OUTSTRIDE_KERNELS names another build of it, for instance one with sanitizers (`make sanitize`).
    """
    if chosen := os.environ.get("OUTSTRIDE_KERNELS"):
        return Path(chosen)
    found = importlib.util.find_spec("outstride.ops.cpu._kernels")
    return Path(found.origin) if found is not None and found.origin else None


@cache
def library() -> c.CDLL:
    """The library with its functions declared."""
    path = library_path()
    if path is None:
        raise OSError("the native library was not built")
    lib = c.CDLL(str(path))
    lib.outstride_isas.restype = c.c_int
    lib.outstride_isas.argtypes = [_P]
    lib.outstride_open.restype = _P
    lib.outstride_open.argtypes = [c.c_int] * 5
    lib.outstride_close.argtypes = [_P]
    lib.outstride_reserve_experts.argtypes = [_P, c.POINTER(ExpertsStruct), c.c_int, c.c_int]
    lib.outstride_reserve_experts.restype = c.c_int
    lib.outstride_pack.argtypes = [_P, *[c.c_int] * 4, c.POINTER(HadamardStruct), _P, _P, _P, _P]
    lib.outstride_pack.restype = None
    lib.outstride_pack_int4.argtypes = [_P, *[c.c_int] * 4, _P, _P]
    lib.outstride_pack_int4.restype = c.c_int
    lib.outstride_repack_int4.argtypes = [_P, *[c.c_int] * 4, _P]
    lib.outstride_repack_int4.restype = c.c_int
    lib.outstride_dequantize.argtypes = [_P, *[c.c_int] * 3, _P]
    lib.outstride_dequantize.restype = None
    lib.outstride_checksum.argtypes = [_P, c.c_int64, c.c_uint64]
    lib.outstride_checksum.restype = c.c_uint64
    lib.outstride_rows.argtypes = [c.POINTER(MatrixStruct), _P, c.c_int, c.c_int, c.c_int, _P, _P]
    lib.outstride_scratch.restype = c.c_int
    lib.outstride_scratch.argtypes = [c.c_int] * 3
    lib.outstride_record.restype = c.c_int
    lib.outstride_record.argtypes = [c.c_int]
    lib.outstride_keep.argtypes = [c.POINTER(LayerStruct), _P, c.c_int, _P, _P]
    lib.outstride_keep.restype = None
    lib.outstride_move.argtypes = [c.POINTER(LayerStruct), c.c_int, _P, _P, c.c_int, _P]
    lib.outstride_move.restype = None
    lib.outstride_layers.argtypes = [_P, c.POINTER(LayerStruct), c.c_int]
    lib.outstride_layers.restype = None
    for name, structure in (
        ("project", LayerStruct),
        ("attend", LayerStruct),
        ("output", LayerStruct),
        ("mlp", LayerStruct),
        ("head", LMHeadStruct),
        ("choose", SampleStruct),
    ):
        function = getattr(lib, f"outstride_{name}")
        function.argtypes = [_P, c.POINTER(structure)]
        function.restype = None
    return lib


@cache
def isas() -> tuple[int, ...]:
    """The builds that this machine has, slowest first, as indices of ISAS."""
    found = (_I * len(ISAS))()
    count: int = library().outstride_isas(found)
    return tuple(found[:count])


def chosen_isa() -> int:
    """The fastest build of this machine, or the one that the environment variable OUTSTRIDE_ISA names.

    Raises `InvalidParams` if this machine has no build of that name.
    """
    wanted = os.environ.get("OUTSTRIDE_ISA")
    if not wanted:
        return isas()[-1]
    here = {ISAS[isa]: isa for isa in isas()}
    if wanted not in here:
        why = "this machine has no such build" if wanted in ISAS else "there is no such build"
        raise InvalidParams(f"OUTSTRIDE_ISA={wanted}: {why}; choose one of {', '.join(here)}")
    return here[wanted]
