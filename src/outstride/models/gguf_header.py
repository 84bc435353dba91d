"""The header of one GGUF file: metadata, and where its tensors are.

It is parsed here, because the reader of the `gguf` package makes objects of each of 50,000 vocabulary
entries, which takes seconds.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from outstride.errors import CorruptModel, UnsupportedModel

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_MAX_RANK = 8
_MAX_COUNT = 1 << 22
"""Elements of the largest array of metadata that is read; vocabularies have some hundred thousand."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape (in torch's order), type and offset of a tensor; part: the number of its file."""

    shape: tuple[int, ...]
    kind: int
    offset: int
    part: int = 0


class _Cursor:
    """Reads the header from front to back."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def take(self, code: str) -> Any:
        """One number."""
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        size = self.take("Q")
        start, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise struct.error("a string reaches beyond the file")
        return bytes(self.data[start : self.at]).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.take(_SCALARS[kind])
        if kind != _ARRAY:
            raise struct.error(f"there is no type {kind} of metadata")
        inner, count = self.take("I"), self.take("Q")
        if count > _MAX_COUNT:
            raise struct.error(f"an array of metadata with {count:,} elements")
        if inner in _SCALARS:
            code = _SCALARS[inner]
            found = np.frombuffer(
                self.data, dtype=np.dtype("<" + code), count=count, offset=self.at
            )
            self.at += found.nbytes
            return found.tolist()
        if inner != _STRING:
            raise struct.error(f"there are no arrays of type {inner}")
        return self._strings(count)

    def _strings(self, count: int) -> list[str]:
        """Strings in a row: vocabularies have hundred thousands of them."""
        data, at, end, found = self.data, self.at, len(self.data), []
        for _ in range(count):
            start = at + 8
            at = start + int.from_bytes(data[at:start], "little")
            if at > end:
                raise struct.error("a string reaches beyond the file")
            found.append(str(data[start:at], "utf-8", "replace"))
        self.at = at
        return found

    def tensor(self, part: int) -> tuple[str, TensorInfo]:
        name, rank = self.string(), self.take("I")
        if not 0 < rank <= _MAX_RANK:
            raise struct.error(f"the tensor {name!r} has {rank} dimensions")
        shape = tuple(self.take("Q") for _ in range(rank))[::-1]
        if not all(shape):
            raise struct.error(f"the tensor {name!r} is empty")
        return name, TensorInfo(shape, self.take("I"), self.take("Q"), part)


class GgufHeader:
    """One mapped file: `metadata` by key, `tensors` by name, `data` from `start` on.

    part: its number, for its tensors.
    """

    def __init__(self, path: Path, part: int = 0) -> None:
        if path.stat().st_size < 24:
            raise CorruptModel(f"{path} is cut off: it is too short to be a GGUF file")
        with path.open("rb") as file:
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.path, self.part = path, part
        cursor = _Cursor(memoryview(self.data))
        if bytes(cursor.data[:4]) != _MAGIC:
            raise CorruptModel(f"{path} is not a GGUF file")
        cursor.at = 4
        version = cursor.take("I")
        if version not in (2, 3):
            raise UnsupportedModel(f"{path} has GGUF version {version}; supported are 2 and 3")
        try:
            self._read(cursor)
        except (struct.error, ValueError, OverflowError, MemoryError) as error:
            raise CorruptModel(f"{path} is cut off or damaged in its header: {error}") from error

    def _read(self, cursor: _Cursor) -> None:
        count, entries = cursor.take("Q"), cursor.take("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.take("I"))
        self.tensors = dict(cursor.tensor(self.part) for _ in range(count))
        step = self.metadata.get("general.alignment", 32)
        if not isinstance(step, int) or step < 1:
            raise ValueError(f"an alignment of {step!r}")
        self.start = -(-cursor.at // step) * step
        offsets = sorted((info.offset, name) for name, info in self.tensors.items())
        for (one, first), (other, second) in pairwise(offsets):
            if one == other:
                raise ValueError(f"the tensors {first!r} and {second!r} overlap")
