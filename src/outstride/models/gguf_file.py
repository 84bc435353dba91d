"""GGUF files: metadata and tensors, with an error for everything that is wrong in a file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outstride.core.graph import FloatArray, IntArray
from outstride.errors import CorruptModel, UnsupportedModel
from outstride.models.gguf_header import GgufHeader
from outstride.models.gguf_split import gguf_parts
from outstride.models.stored import StoredTensor
from outstride.ops.cpu import native
from outstride.ops.matrix_rows import BLOCK_KINDS, DEQUANTIZED_KINDS


class GgufFile:
    """An open model: `metadata` by key, `tensors` by name.

    path: the file, or any of the files of a model in several.
    """

    def __init__(self, path: Path) -> None:
        files = gguf_parts(path)
        self._parts = [GgufHeader(file, number) for number, file in enumerate(files)]
        self.path, self.metadata = files[0], self._parts[0].metadata
        self.tensors = {name: info for part in self._parts for name, info in part.tensors.items()}
        self._check_split()
        self.architecture = str(self.metadata.get("general.architecture", "unknown"))
        """Outlives the metadata, which are dropped once they are read."""

    def _check_split(self) -> None:
        count = int(self.metadata.get("split.count", 0) or len(self._parts))
        if count not in (0, 1, len(self._parts)):
            raise CorruptModel(
                f"{self.path} is a part of a model in {count} files; give them the names that they "
                f"were published with (NAME-00001-of-{count:05d}.gguf)"
            )
        for number, part in enumerate(self._parts):
            if int(part.metadata.get("split.no", number)) != number:
                raise CorruptModel(f"{part.path} holds another part than its name says")
        total = self.metadata.get("split.tensors.count")
        if total is not None and int(total) != len(self.tensors):
            raise CorruptModel(
                f"{self.path} and its other parts hold {len(self.tensors)} tensors; there should be "
                f"{total}"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """A value that belongs to the architecture, such as `block_count`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        """A value that belongs to the architecture; an error if it is missing."""
        value = self.get(key)
        if value is None:
            raise CorruptModel(f"{self.path} lacks the key {self.architecture}.{key}")
        return value

    @property
    def layers(self) -> int:
        """How many layers the model has; those that predict further tokens are not counted."""
        return int(self.need("block_count")) - int(self.get("nextn_predict_layers") or 0)

    @property
    def head_dim(self) -> int:
        """The size of a head."""
        heads, rotated = self.need("attention.head_count"), self.get("rope.dimension_count")
        whole, rest = divmod(int(self.need("embedding_length")), int(heads))
        return int(self.get("attention.key_length") or (rotated if rest else whole))

    def per_layer(self, key: str) -> list[int]:
        """A number for each layer, where the file has one for all or a list."""
        value = self.need(key)
        return [int(x) for x in (value if isinstance(value, list) else [value] * self.layers)]

    def tensor(
        self,
        name: str,
        stored_as: str = "",
        order: IntArray | None = None,
        shape: tuple[int, ...] | None = None,
        start: int = 0,
    ) -> GgufTensor:
        """A tensor of the file, or some of its rows; nothing is copied.

        stored_as: its checkpoint name. order: of its rows, if another. shape, start: the shape of the
        part to take, and its first row; leading dimensions of the tensor count as rows.
        """
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        info = self.tensors[name]
        part = self._parts[info.part]
        try:
            kind = GGMLQuantizationType(info.kind)
            per_block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise UnsupportedModel(
                f"{name} in {part.path} has the unknown type {info.kind}"
            ) from error
        count = math.prod(info.shape)
        if info.shape[-1] % per_block:
            raise CorruptModel(f"{name} in {part.path} has rows that are not whole blocks")
        at, size = part.start + info.offset, count // per_block * block_bytes
        if at + size > len(part.data):
            raise CorruptModel(f"{part.path} is cut off: {name} reaches beyond its end")
        raw = np.frombuffer(part.data, dtype=np.uint8, count=size, offset=at)
        shape = shape or info.shape
        if len(shape) == 1 and per_block > 1:
            raise UnsupportedModel(f"{name} in {part.path} is a quantized vector")
        row = math.prod(shape[1:]) * block_bytes // per_block
        raw = raw.reshape(-1, row)[start : start + shape[0]]
        return GgufTensor(stored_as or name, shape, kind, raw, order, f"{name} in {part.path}")


class GgufTensor(StoredTensor):
    """A tensor of a GGUF file, dequantized by native code or, for rare types, the `gguf` package."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        kind: Any,
        raw: npt.NDArray[np.uint8],
        order: IntArray | None,
        place: str,
    ) -> None:
        self.name, self.shape, self._place = name, shape, place
        self._kind, self._raw, self._order = kind, raw, order
        self.block_kind = kind.name if kind.name in BLOCK_KINDS else None
        if kind.name not in ("F32", "F16", "BF16", "F64"):
            self.stored_bits = 8 * raw.shape[1] / shape[-1]
        rows = np.arange(len(raw)) if order is None else order
        self._addresses = np.asarray(raw.ctypes.data + rows * raw.shape[1], dtype=np.uint64)

    def floats(self, rows: IntArray | slice) -> FloatArray:
        if self._kind.name in DEQUANTIZED_KINDS and native.library_path() is not None:
            addresses = np.ascontiguousarray(self._addresses[rows])
            result = np.empty((len(addresses), self.shape[-1]), dtype=np.float32)
            native.library().outstride_dequantize(
                addresses.ctypes.data,
                DEQUANTIZED_KINDS.index(self._kind.name),
                *result.shape,
                result.ctypes.data,
            )
            return result.reshape(-1, *self.shape[1:])
        from gguf.quants import dequantize

        part = self._raw[rows if self._order is None else self._order[rows]]
        try:
            if self._kind.name == "F32":
                found = np.array(part.view("<f4"))
            elif self._kind.name == "F16":
                found = part.view("<f2").astype(np.float32)
            else:
                found = dequantize(part, self._kind)
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"{self._place} is quantized as {self._kind.name}, which is not supported"
            ) from error
        return found.reshape(-1, *self.shape[1:])

    def raw(self) -> npt.NDArray[np.uint8]:
        return self._raw

    def addresses(self) -> npt.NDArray[np.uint64]:
        return self._addresses
