"""Runs the CUDA backend without a GPU: Triton's interpreter, and closures in place of CUDA graphs.

    pytest -p tests.ops.cuda_on_cpu tests/ops/test_cuda_run_ahead.py

runs GPU tests on the CPU, where Triton is installed. A step of a tiny model takes about a second, so
most of them take minutes; `test_cuda_on_cpu.py` has a selection. What runs is the real host code and
the real kernels in numpy, in order: results and metadata are tested, but not races or compilation.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch

RUNNABLE = (
    importlib.util.find_spec("triton") is not None
    and not torch.cuda.is_available()
    and ("triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1")
)
"""Triton reads its settings when it is imported: it must not have been imported otherwise before."""
PARTIAL = 1 << 20


class GraphOnCpu:
    """Stands in for `CudaGraph`: capturing remembers the work, replaying does it again."""

    def __init__(self, work: Callable[[GraphOnCpu], object]) -> None:
        self._work, self.void = work, False

    def cut(self) -> None:
        """Nothing to do: there is one graph."""

    def replay(self) -> None:
        self._work(self)


class _Memory:
    """The interpreter's loads and stores; masks may be integers, as they may be in Triton."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def load(self, at: Any, mask: Any, other: Any, dtype: Any) -> Any:
        return self._native.load(at, mask.astype(bool), other, dtype)

    def store(self, at: Any, value: Any, mask: Any) -> Any:
        return self._native.store(at, value, mask.astype(bool))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)


class _Patched:
    """What patching `triton.language` returns: it stays patched."""

    def restore(self) -> None:
        """Nothing to restore."""


def _hasten(interpreter: Any, language: Any) -> None:
    """Patches the language once instead of at each call, and checks no integer for overflow."""
    interpreter._patch_lang(
        types.SimpleNamespace(__globals__={"tl": language, "core": language.core})
    )
    interpreter._patch_lang = lambda function: _Patched()
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._interpreter = _Memory(interpreter._interpreter)


def make_ops(model: Any, *, graphs: bool = True, pdl: bool | None = None) -> Any:
    """The backend on the CPU; kernels never overlap there."""
    from outstride.ops.cuda.backend import Cuda

    return Cuda(model, device="cpu", graphs=graphs, pdl=False)


@cache
def patch_triton() -> None:
    """Makes the backend run in this process; must come before anything else imports Triton."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as language  # type: ignore[import-not-found,unused-ignore]
    from triton.runtime import interpreter  # type: ignore[import-not-found,unused-ignore]

    _hasten(interpreter, language)
    for name, attribute, value in (
        ("attention", "PARTIAL", PARTIAL),
        ("decoder_layers", "PARTIAL", PARTIAL),
        ("launch", "CudaGraph", GraphOnCpu),
    ):
        setattr(importlib.import_module(f"outstride.ops.cuda.{name}"), attribute, value)


def install() -> None:
    """Replaces the GPU: `ops.cuda.available` is true, and `ops.cuda.Cuda` runs on the CPU."""
    patch_triton()
    package: Any = importlib.import_module("outstride.ops.cuda")
    package.Cuda, package.available = make_ops, lambda: True


def pytest_configure() -> None:
    """As a plugin: before any test is collected."""
    if RUNNABLE:
        install()
