"""The compiled host functions for the work between passes, if they were built (see host.cpp)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt


@cache
def library() -> ModuleType | None:
    """The compiled module; None if the package was installed without a compiler.

    OUTSTRIDE_HOST names another build of it, for instance one with sanitizers (`make sanitize`).
    """
    name = "outstride.core._host"
    chosen = os.environ.get("OUTSTRIDE_HOST")
    spec = (
        importlib.util.spec_from_file_location(name, chosen)
        if chosen
        else importlib.util.find_spec(name)
    )
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _address(array: npt.NDArray[Any]) -> int:
    return array.ctypes.data


def _finder() -> Callable[[npt.NDArray[np.generic]], int]:
    lib = library()
    found: Callable[[npt.NDArray[np.generic]], int] = _address if lib is None else lib.address
    return found


address = _finder()
"""The address of an array's data. It is called dozens of times in each step."""
