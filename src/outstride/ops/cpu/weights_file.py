"""The file that keeps packed weights between starts: safetensors, with a checksum of each array.

It is written array by array, and read straight into the memory that the kernels use: no second copy of
the weights exists at any time.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outstride.errors import CorruptModel
from outstride.ops.cpu import native
from outstride.ops.matrix_rows import workers

_DTYPES = {"F32": np.dtype("<f4"), "I32": np.dtype("<i4"), "U8": np.dtype("u1")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_PORTION = 4 << 20
"""Bytes that a thread reads and checks at a time, while they are in the processor's cache."""
_ABOUT, _HEADER_SUM = "__metadata__", "header sum"

Array = npt.NDArray[np.generic]


def write_arrays(path: Path, arrays: Mapping[str, Array], about: Mapping[str, str]) -> None:
    """Writes arrays with their checksums and a description; the file appears once it is complete."""
    sums = {f"sum {name}": f"{_checksum(_bytes(array)):016x}" for name, array in arrays.items()}
    header: dict[str, Any] = {_ABOUT: {**about, **sums}}
    at = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    header[_ABOUT][_HEADER_SUM] = _sum_of_header(header)
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.part")
    try:
        with unfinished.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for array in arrays.values():
                file.write(_bytes(array).data)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


class WeightsFile:
    """A file that `write_arrays` wrote: `about` is its description, `names` are its arrays."""

    def __init__(self, path: Path) -> None:
        """Reads the header; raises CorruptModel if it is damaged or the file is cut off."""
        self.path = path
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                if size > path.stat().st_size - 8:
                    raise ValueError("it is cut off")
                header = json.loads(file.read(size))
            self.about: dict[str, str] = header[_ABOUT]
            if self.about.pop(_HEADER_SUM) != _sum_of_header(header):
                raise ValueError("its header is damaged")
            del header[_ABOUT]
            self._entries: dict[str, Any] = header
            self._start = 8 + size
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
            if self._start + end != path.stat().st_size:
                raise ValueError("it is cut off")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptModel(f"{path} cannot be read: {error}") from error

    @property
    def names(self) -> set[str]:
        return set(self._entries)

    def read_into(self, targets: Mapping[str, Array]) -> None:
        """Reads arrays into memory that is there already, on all cores, and checks each of them.

        Raises CorruptModel if the file lacks one, has it in another size, or it is damaged.
        """
        portions: list[tuple[str, int, Array]] = []
        for name, target in targets.items():
            entry = self._entries.get(name)
            if entry is None or (entry["dtype"], entry["shape"]) != (
                _NAMES[target.dtype],
                list(target.shape),
            ):
                raise CorruptModel(f"{self.path} does not fit the model: {name}")
            raw, start = _bytes(target), self._start + int(entry["data_offsets"][0])
            for at in range(0, raw.size, _PORTION):
                portions.append((name, start + at, raw[at : at + _PORTION]))
        found = dict.fromkeys(targets, 0)
        with self.path.open("rb") as file, ThreadPoolExecutor(workers()) as pool:

            def read(portion: tuple[str, int, Array]) -> int:
                name, at, into = portion
                if os.preadv(file.fileno(), [into.data], at) != into.nbytes:
                    raise CorruptModel(f"{self.path} is cut off: {name}")
                return _sum_of_portion(into)

            for (name, _, _), value in zip(portions, pool.map(read, portions), strict=True):
                found[name] = _joined_sum(found[name], value)
        for name, value in found.items():
            if self.about.get(f"sum {name}") != f"{value:016x}":
                raise CorruptModel(f"{self.path} is damaged: {name}")


def _bytes(array: Array) -> npt.NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


def _sum_of_header(header: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(header, sort_keys=True).encode()):08x}"


def _sum_of_portion(portion: Array) -> int:
    return int(native.library().outstride_checksum(portion.ctypes.data, portion.nbytes, 0))


def _joined_sum(before: int, value: int) -> int:
    """The checksum of two runs of portions; their order counts."""
    return (before * 0x9E3779B97F4A7C15 + value) % (1 << 64)


def _checksum(raw: npt.NDArray[np.uint8]) -> int:
    total = 0
    portions = [raw[at : at + _PORTION] for at in range(0, raw.size, _PORTION)]
    with ThreadPoolExecutor(workers()) as pool:
        for value in pool.map(_sum_of_portion, portions):
            total = _joined_sum(total, value)
    return total
