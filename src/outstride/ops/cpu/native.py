"""The native library: where it is, what its structures look like, how it is called."""

from __future__ import annotations

import ctypes as c
import importlib.util
import os
from functools import cache
from pathlib import Path

import numpy as np

_F, _I = c.c_float, c.c_int32
_P = c.c_void_p


class Stir(c.Structure):
    """How rows are stirred: see kernels.cpp, here and below."""

    _fields_ = (
        ("signs", _P),
        ("factors", _P),
        ("blends", _P),
        ("run", _I),
    )


class Matrix(c.Structure):
    """Packed weights."""

    _fields_ = (
        ("data", _P),
        ("scale", _P),
        ("zero", _P),
        ("bias", _P),
        ("stir", c.POINTER(Stir)),
        ("tiles", _I),
        ("depth", _I),
        ("bits", _I),
    )


class LowRank(c.Structure):
    _fields_ = (
        ("low", _P),
        ("high", _P),
        ("parts", _P),
        ("rank", _I),
    )


NODE = np.dtype([(name, np.int32) for name in ("row", "start", "count", "direct", "pages", "tail")])


class Pass(c.Structure):
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
        ("gates", _P),
        ("low", _P),
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


class Layer(c.Structure):
    _fields_ = (
        ("batch", c.POINTER(Pass)),
        ("nodes", c.POINTER(_P)),
        ("attention_norm", _P),
        ("query_norm", _P),
        ("key_norm", _P),
        ("mlp_norm", _P),
        ("qkv", c.POINTER(Matrix)),
        ("output", c.POINTER(Matrix)),
        ("gate_up", c.POINTER(Matrix)),
        ("down", c.POINTER(Matrix)),
        ("keys", _P),
        ("values", _P),
        ("adapter", c.POINTER(LowRank)),
        ("rotate", _I),
    )


BEST = np.dtype([("value", np.float32), ("token", np.int32)])


class Head(c.Structure):
    _fields_ = (
        ("x", _P),
        ("norm", _P),
        ("matrix", c.POINTER(Matrix)),
        ("logits", _P),
        ("best", _P),
        ("rows", _I),
        ("width", _I),
        ("hidden", _I),
        ("vocabulary", _I),
        ("k", _I),
        ("eps", _F),
    )


DRAW = np.dtype(
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


class Choose(c.Structure):
    _fields_ = (
        ("logits", _P),
        ("draws", _P),
        ("scaled", _P),
        ("room", _P),
        ("out", _P),
        ("rows", _I),
        ("stride", _I),
        ("vocabulary", _I),
        ("k", _I),
    )


MOST_BEST = 64
"""So many tokens can be chosen for a node in native code."""
MOST_FUSED = 16
"""So many of them without rows of the vocabulary, at temperature 0."""
ISAS = ("portable", "avx2", "avx512-vnni", "amx")


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
    lib.outstride_best_isa.restype = c.c_int
    lib.outstride_open.restype = _P
    lib.outstride_open.argtypes = [c.c_int] * 5
    lib.outstride_close.argtypes = [_P]
    lib.outstride_pack.argtypes = [_P, *[c.c_int] * 4, c.POINTER(Stir), _P, _P, _P, _P]
    lib.outstride_rows.argtypes = [c.POINTER(Matrix), _P, c.c_int, c.c_int, c.c_int, _P, _P]
    lib.outstride_scratch.restype = c.c_int
    lib.outstride_scratch.argtypes = [c.c_int] * 3
    lib.outstride_record.restype = c.c_int
    lib.outstride_record.argtypes = [c.c_int]
    lib.outstride_keep.argtypes = [c.POINTER(Layer), _P, c.c_int, _P, _P]
    lib.outstride_keep.restype = None
    lib.outstride_move.argtypes = [c.POINTER(Layer), c.c_int, _P, _P, c.c_int, _P]
    lib.outstride_move.restype = None
    lib.outstride_layers.argtypes = [_P, c.POINTER(Layer), c.c_int]
    lib.outstride_layers.restype = None
    for name, structure in (
        ("project", Layer),
        ("attend", Layer),
        ("output", Layer),
        ("mlp", Layer),
        ("head", Head),
        ("choose", Choose),
    ):
        function = getattr(lib, f"outstride_{name}")
        function.argtypes = [_P, c.POINTER(structure)]
        function.restype = None
    return lib
