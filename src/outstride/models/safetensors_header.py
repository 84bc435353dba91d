"""The header of a safetensors file, checked before anything else reads the file.

The sizes and offsets in a header may be wrong. Here they are compared with the file's own size, so
that a damaged or hostile file is an error at once and reserves no memory.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from outstride.errors import CorruptModel, UnsupportedModel

MAX_HEADER = 32 << 20
"""Bytes of the largest header that is read; that of a file with 20,000 tensors has about 4 million."""
MAX_RANK = 8
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def check_safetensors(path: Path) -> None:
    """An error that says what is wrong with a safetensors file; no tensor is read."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) == 8 and 2 <= length <= min(size - 8, MAX_HEADER):
            header = file.read(length)
        elif start.startswith(_PICKLES):
            raise UnsupportedModel(
                f"{path} holds pickled Python objects and not safetensors; {PICKLE}"
            )
        else:
            raise CorruptModel(
                f"{path} is cut off or damaged: it has {size:,} bytes and states a header of "
                f"{length:,} (at most {MAX_HEADER:,})"
            )
    try:
        found = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise CorruptModel(f"{path} is cut off or damaged in its header: {error}") from error
    if not isinstance(found, dict):
        raise CorruptModel(f"{path} is damaged: its header is not an object")
    found.pop("__metadata__", None)
    _check_places(path, [(name, *_extent(path, name, about)) for name, about in found.items()],
                  size - 8 - length)  # fmt: skip


PICKLE = (
    "such files can run code when they are opened, so they are never read: get the repository in "
    "safetensors, or convert it with transformers (save_pretrained) on a machine that may run it"
)
"""What is said about `.bin`, `.pt` and `.pth` files."""


def _extent(path: Path, name: str, about: Any) -> tuple[int, int]:
    """Where the bytes of a tensor begin and end."""
    try:
        bits, shape = _BITS[about["dtype"]], about["shape"]
        start, end = about["data_offsets"]
    except KeyError as error:
        raise CorruptModel(
            f"{path} is damaged: the tensor {name!r} lacks {error.args[0]!r}, or that is its type"
        ) from error
    except (TypeError, ValueError) as error:
        raise CorruptModel(f"{path} is damaged: the tensor {name!r} is not described") from error
    numbers = [*shape, start, end] if isinstance(shape, list) else [None]
    if len(numbers) > MAX_RANK + 2 or not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
        raise CorruptModel(
            f"{path} is damaged: the tensor {name!r} has an impossible size or place"
        )
    if math.prod(shape) * bits != (end - start) * 8:
        raise CorruptModel(
            f"{path} is damaged: the tensor {name!r} of {shape} does not have {end - start:,} bytes"
        )
    return start, end


def _check_places(path: Path, places: list[tuple[str, int, int]], size: int) -> None:
    """An error if tensors overlap or reach beyond the file."""
    at, before = 0, ""
    for name, start, end in sorted(places, key=lambda place: place[1:]):
        if end > size:
            raise CorruptModel(
                f"{path} is cut off or damaged: the tensor {name!r} reaches {end - size:,} bytes "
                "beyond its end"
            )
        if start < at:
            raise CorruptModel(f"{path} is damaged: the tensors {before!r} and {name!r} overlap")
        at, before = end, name
