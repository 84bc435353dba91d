"""Keeps imported objects out of the scans of Python's garbage collector."""

from __future__ import annotations

import gc
from functools import cache


@cache
def freeze_imports() -> None:
    """Freezes all objects that exist now, once in the life of a process.

    Torch alone creates more than a hundred thousand objects that stay until the end. Scanning them
    takes longer than many steps, and a full collection may happen in the middle of an answer. Objects
    that are created later, the model's included, are collected as usual. Objects that the caller
    created before are frozen, too; so this is called before the first model is loaded, and garbage is
    collected first.
    """
    # Imports everything that loading a model would import.
    from outstride.models import decoder  # noqa: F401

    gc.collect()
    gc.freeze()
