"""Records calls of the native kernels, with all memory that they read and write, for replay.cpp.

A `RecordingLibrary` takes the place of the library. Before each call it finds the memory that the
arguments point to: arrays and structs of the calling functions and of the objects that they hold. What
the host changed since the last call goes into the file, then the call, then what the call changed.
"""

from __future__ import annotations

import bisect
import ctypes
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from outstride.ops.cpu import native
from outstride.ops.cpu.hadamard import HadamardRotation

END, MEMORY, POINTER, OPEN, CALL, EXPECT = range(6)
NUMBER, ADDRESS, ENGINE = range(3)
WITH_ENGINE = ("project", "attend", "output", "mlp", "head", "choose", "reserve_experts")
PACKING = ("pack", "pack_int4", "repack_int4", "dequantize")
KERNELS = (*WITH_ENGINE, *PACKING, "keep", "move", "rows")
FRAMES = 8
"""How many calling functions are searched for arrays."""

_SIMPLE, _POINTER = ctypes.c_void_p.__mro__[1], ctypes._Pointer
_C_DATA = (_SIMPLE, _POINTER, ctypes.Structure, ctypes.Array)


def pointer_slots(kind: Any, base: int) -> Iterator[int]:
    """Where pointers lie in a value of a ctypes type."""
    if issubclass(kind, ctypes.Structure):
        for name, inner in kind._fields_:
            yield from pointer_slots(inner, base + getattr(kind, name).offset)
    elif issubclass(kind, ctypes.Array):
        for i in range(kind._length_):
            yield from pointer_slots(kind._type_, base + i * ctypes.sizeof(kind._type_))
    elif kind is ctypes.c_void_p or issubclass(kind, _POINTER):
        yield base


@dataclass
class Memory:
    """Ranges of memory that are known at the time of a call, and where pointers lie in them."""

    ranges: list[tuple[int, int]] = field(default_factory=list)
    slots: set[int] = field(default_factory=set)
    _seen: dict[int, object] = field(default_factory=dict)

    @classmethod
    def held_by(cls, roots: list[object]) -> Memory:
        found = cls()
        while roots:
            value = roots.pop()
            if id(value) not in found._seen:
                found._seen[id(value)] = value
                roots += found._look(value)
        found._join()
        return found

    def _look(self, value: object) -> list[object]:
        """Notes the memory of one object; returns those that it holds."""
        if isinstance(value, np.ndarray):
            low, high = np.lib.array_utils.byte_bounds(value)
            self.ranges.append((low, max(high, low + 1)))
        elif isinstance(value, _C_DATA):
            return self._look_at_c(value)
        elif isinstance(value, dict):
            return list(value.values())
        elif isinstance(value, list | tuple):
            return list(value)
        elif type(value).__module__.startswith("outstride."):
            names = [
                name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())
            ]
            return [*getattr(value, "__dict__", {}).values()] + [
                getattr(value, name) for name in names if hasattr(value, name)
            ]
        return []

    def _look_at_c(self, value: Any) -> list[object]:
        start = ctypes.addressof(value)
        self.ranges.append((start, start + ctypes.sizeof(value)))
        self.slots.update(pointer_slots(type(value), start))
        if isinstance(value, _POINTER):
            return [value.contents] if value else []
        if isinstance(value, ctypes.Array):
            return list(value)
        if isinstance(value, ctypes.Structure):
            names = [entry[0] for entry in value._fields_ if issubclass(entry[1], _POINTER)]
            rotated = isinstance(value, native.MatrixStruct) and value.rotation
            tables = [HadamardRotation.of(value.depth)] if rotated else []
            return [*tables, *(getattr(value, name) for name in names)]
        return []

    def _join(self) -> None:
        """One range for all views of an array."""
        joined: list[tuple[int, int]] = []
        for low, high in sorted(self.ranges):
            if joined and low < joined[-1][1]:
                joined[-1] = joined[-1][0], max(high, joined[-1][1])
            else:
                joined.append((low, high))
        self.ranges = joined

    def range_of(self, address: int) -> tuple[int, int]:
        at = bisect.bisect(self.ranges, (address, sys.maxsize)) - 1
        low, high = self.ranges[at]
        if at < 0 or not low <= address < high:
            raise LookupError(f"a kernel is given memory at {address:#x} that nothing here holds")
        return low, high

    def pointers_in(self, low: int, high: int) -> dict[int, int]:
        """Pointers in a range, other than null, by their offset."""
        if high - low < 8:
            return {}
        offsets = sorted(slot - low for slot in self.slots if low <= slot < high)
        values = {at: ctypes.c_uint64.from_address(low + at).value for at in offsets}
        return {at: value for at, value in values.items() if value}

    def reached_from(self, addresses: list[int]) -> list[tuple[int, int]]:
        """The ranges that a call can read or write."""
        found: dict[tuple[int, int], None] = {}
        while addresses:
            place = self.range_of(addresses.pop())
            if place not in found:
                found[place] = None
                addresses += self.pointers_in(*place).values()
        return list(found)


class Recording:
    """Writes the file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._ids: dict[tuple[int, int], int] = {}
        self._known: dict[int, tuple[bytes, dict[int, tuple[int, int]]]] = {}
        self.calls: dict[str, int] = dict.fromkeys(KERNELS, 0)
        self.lock = threading.Lock()  # weights are packed by several threads

    def close(self) -> None:
        self._write("I", END)
        self._file.close()

    def open(self, rows: int, depth: int, scratch: int) -> None:
        self._write("Iiii", OPEN, rows, depth, scratch)

    def call(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Calls a kernel and records the call; returns what it returns."""
        frame, roots = sys._getframe(2), list[object](args)
        for _ in range(FRAMES):
            roots += frame.f_locals.values()
            if frame.f_back is None:
                break
            frame = frame.f_back
        if name == "pack":
            roots.append(HadamardRotation.of(args[4]))
        memory = Memory.held_by(roots)
        given = list(self._arguments(name, function, args))
        reached = memory.reached_from([value for kind, value in given if kind == ADDRESS])
        ids = {place: self._ids.setdefault(place, len(self._ids)) for place in reached}
        self._send(memory, ids)
        self._write(f"II{len(name)}sI", CALL, len(name), name.encode(), len(given))
        for kind, value in given:
            if kind == ADDRESS:
                place = memory.range_of(value)
                self._write("IIQ", kind, ids[place], value - place[0])
            else:
                self._write(*(("IQ", kind, value) if kind == NUMBER else ("I", kind)))
        result = function(*args)
        self.calls[name] += 1
        for place in reached:
            state = self._state(memory, place, ids)
            self._write_changes(EXPECT, ids[place], self._known[ids[place]][0], state[0])
            self._known[ids[place]] = state
        return result

    def _arguments(
        self, name: str, function: Any, args: tuple[Any, ...]
    ) -> Iterator[tuple[int, int]]:
        for i, (value, kind) in enumerate(zip(args, function.argtypes, strict=True)):
            if i == 0 and name in WITH_ENGINE:
                yield ENGINE, 0
            elif isinstance(value, ctypes._Pointer):
                yield ADDRESS, ctypes.addressof(value.contents)
            elif isinstance(value, ctypes.Structure | ctypes.Array):
                yield ADDRESS, ctypes.addressof(value)
            else:
                yield ADDRESS if kind is ctypes.c_void_p else NUMBER, value

    def _state(
        self, memory: Memory, place: tuple[int, int], ids: dict[tuple[int, int], int]
    ) -> tuple[bytes, dict[int, tuple[int, int]]]:
        """The bytes of a range, with 0 for pointers, and where these point to."""
        low, high = place
        image, pointers = bytearray(ctypes.string_at(low, high - low)), {}
        for at, value in memory.pointers_in(low, high).items():
            image[at : at + 8] = bytes(8)
            target = memory.range_of(value)
            pointers[at] = ids[target], value - target[0]
        return bytes(image), pointers

    def _send(self, memory: Memory, ids: dict[tuple[int, int], int]) -> None:
        """Ranges that the replay does not have as they are; then the pointers in them."""
        changed = []
        for place, number in ids.items():
            image, pointers = state = self._state(memory, place, ids)
            before, pointed = self._known.get(number, (b"", {}))
            if pointed != pointers:  # those that are null now are zeros of the image
                before = b""
            self._write_changes(MEMORY, number, before, image)
            if before != image:
                changed.append((number, pointers))
            self._known[number] = state
        for number, pointers in changed:
            for at, (target, offset) in pointers.items():
                self._write("IIQIQ", POINTER, number, at, target, offset)

    def _write_changes(self, kind: int, number: int, before: bytes, after: bytes) -> None:
        """The bytes from the first to the last that differ."""
        if before == after:
            return
        first, last = 0, len(after)
        if before:
            one, two = (np.frombuffer(image, dtype=np.uint8) for image in (before, after))
            different = np.flatnonzero(one != two)
            first, last = int(different[0]), int(different[-1]) + 1
        part = after[first:last]
        self._write(f"IIQQQ{len(part)}s", kind, number, len(after), first, len(part), part)

    def _write(self, form: str, *values: Any) -> None:
        self._file.write(struct.pack("<" + form, *values))


class RecordingLibrary:
    """The native library, with calls of its kernels recorded; a run of layers as single kernels."""

    def __init__(self, lib: ctypes.CDLL, recording: Recording) -> None:
        self._lib, self._recording = lib, recording

    def __getattr__(self, name: str) -> Any:
        kernel, function = name.removeprefix("outstride_"), getattr(self._lib, name)
        if kernel not in KERNELS:
            return function

        def call(*args: Any) -> Any:
            with self._recording.lock:
                return self._recording.call(kernel, function, args)

        return call

    def outstride_open(self, threads: int, isa: int, rows: int, depth: int, scratch: int) -> Any:
        self._recording.open(rows, depth, scratch)
        return self._lib.outstride_open(threads, isa, rows, depth, scratch)

    def outstride_layers(self, engine: int, first: native.LayerStruct, count: int) -> None:
        layers = ctypes.cast(ctypes.pointer(first), ctypes.POINTER(native.LayerStruct))
        for i in range(count):
            for kernel in ("project", "attend", "output", "mlp"):
                function = getattr(self._lib, f"outstride_{kernel}")
                self._recording.call(kernel, function, (engine, layers[i]))
