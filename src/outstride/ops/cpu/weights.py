"""All weights of a model in the native format, and the file in which they are kept between starts."""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from outstride.core.graph import FloatArray
from outstride.errors import CorruptModel
from outstride.ops.contract import LayerWeights, Model, Shape
from outstride.ops.cpu.groups import GROUP, Grouped
from outstride.ops.cpu.packed import Packed, alternating, rounded

FORMATS = {8: "outstride int8 3", 4: "outstride int4 2"}
"""By the bits of a layer's weights; rises when the same weights would be packed differently."""
LARGE = 2 << 20

_MATRICES = ("qkv", "output", "gate_up", "down")
_VECTORS = ("attention_norm", "query_norm", "key_norm", "mlp_norm")
_PARTS = ("data", "scale", "zero", "bias")
_GROUPED_PARTS = ("data", "bias")

Matrix: TypeAlias = Packed | Grouped


def widths(shape: Shape) -> tuple[int, int, int]:
    """How wide the kernels make rows of states, of all heads together, and of the middle."""
    return (
        rounded(shape.hidden_size, 32),
        rounded(shape.heads * shape.head_dim, 16),
        rounded(shape.intermediate_size, 16),
    )


@dataclass(slots=True)
class Layer:
    """The weights of one layer."""

    attention_norm: FloatArray
    query_norm: FloatArray | None
    key_norm: FloatArray | None
    mlp_norm: FloatArray
    qkv: Matrix
    output: Matrix
    gate_up: Matrix
    down: Matrix


def matrices_of(layers: Sequence[Layer]) -> list[Matrix]:
    """In the order in which a pass reads them."""
    return [getattr(layer, name) for layer in layers for name in _MATRICES]


def in_large_pages(size: int) -> npt.NDArray[np.uint8]:
    """Zeros that take memory only once they are written.

    In pages of two megabytes, where the system has them to give: a pass reads all weights and all that
    is cached, and spends much of its time on finding small pages.
    """
    room = rounded(size, LARGE) + LARGE
    memory = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = np.frombuffer(memory, dtype=np.uint8)
    at = -buffer.ctypes.data % LARGE
    return buffer[at : at + size]


def into_large_pages(matrices: Sequence[Matrix]) -> None:
    """Moves matrices, in this order, into one piece of memory."""
    buffer, at = in_large_pages(sum(rounded(matrix.data.size, 64) for matrix in matrices)), 0
    for matrix in matrices:
        matrix.move(buffer[at : at + matrix.data.size])
        at += rounded(matrix.data.size, 64)


@dataclass(slots=True)
class Weights:
    """The weights of a model; one that uses its head to embed has one table for both.

    bits: of the weights of layers. Embedding and head always have 8: a head of 4 bits would save less
    time than it costs in closeness.
    """

    layers: list[Layer]
    vocabulary: Packed
    embedding: Packed
    norm: FloatArray
    bits: int = 8

    @classmethod
    def pack(cls, model: Model, bits: int = 8) -> Weights:
        """From float32; layers are taken one by one, so that the model never exists twice."""
        shape, layers = model.shape, []
        width = widths(shape)[0]
        while model.layers:
            layers.append(pack_layer(shape, model.layers.pop(0), bits))
        table = model.embedding if model.head is None else model.head
        vocabulary = Packed.of(table.numpy(), None, width)
        embedding = vocabulary
        if model.head is not None:
            embedding = Packed.of(model.embedding.numpy(), None, width)
        return cls(layers, vocabulary, embedding, padded(model.norm, width), bits)

    def into_large_pages(self) -> None:
        """Moves all matrices."""
        own = [self.embedding] * (self.embedding is not self.vocabulary)
        into_large_pages([*matrices_of(self.layers), self.vocabulary, *own])

    # --- the file ---------------------------------------------------------------------------------

    def write(self, path: Path, about: Mapping[str, str]) -> None:
        """Keeps the weights, with a checksum of each array and what they were made from."""
        from safetensors.numpy import save_file

        arrays: dict[str, npt.NDArray[np.generic]] = {"norm": self.norm}
        for i, layer in enumerate(self.layers):
            for name in _VECTORS:
                if (vector := getattr(layer, name)) is not None:
                    arrays[f"{i}.{name}"] = vector
            for name in _MATRICES:
                arrays |= _parts(f"{i}.{name}", getattr(layer, name))
        arrays |= _parts("vocabulary", self.vocabulary)
        if self.embedding is not self.vocabulary:
            arrays |= _parts("embedding", self.embedding)
        sums = {f"crc {name}": f"{zlib.crc32(a.data):08x}" for name, a in arrays.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        save_file(arrays, str(unfinished), {**about, **sums, "format": FORMATS[self.bits]})
        unfinished.replace(path)

    @classmethod
    def read(
        cls, path: Path, shape: Shape, about: Mapping[str, str], bits: int = 8
    ) -> tuple[Weights, Mapping[str, str]]:
        """What `write` kept and was told; CorruptModel if it is damaged or made from other weights."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="np") as file:
                known = file.metadata() or {}
                expected = {**about, "format": FORMATS[bits]}
                if any(known.get(key) != value for key, value in expected.items()):
                    raise CorruptModel(f"{path} was made from other weights")
                names = file.keys()
                arrays = {name: file.get_tensor(name) for name in names}
        except (SafetensorError, OSError) as error:
            raise CorruptModel(f"{path} cannot be read: {error}") from error
        for name, array in arrays.items():
            if known.get(f"crc {name}") != f"{zlib.crc32(array.data):08x}":
                raise CorruptModel(f"{path} is damaged: {name}")
        try:
            return cls._assemble(arrays, shape, bits), known
        except (KeyError, ValueError) as error:
            raise CorruptModel(f"{path} does not fit the model: {error}") from error

    @classmethod
    def _assemble(
        cls, arrays: Mapping[str, npt.NDArray[np.generic]], shape: Shape, bits: int
    ) -> Weights:
        width, heads, middle = widths(shape)
        rows = shape.heads * shape.head_dim
        sizes = {
            "qkv": (rows + 2 * shape.kv_heads * shape.head_dim, shape.hidden_size, width),
            "output": (shape.hidden_size, rows, heads),
            "gate_up": (2 * middle, shape.hidden_size, width),
            "down": (shape.hidden_size, shape.intermediate_size, middle),
        }
        layers = []
        for i in range(shape.layers):
            vectors = {name: arrays.get(f"{i}.{name}") for name in _VECTORS}
            join = _joined if bits == 8 else _joined_groups
            matrices = {name: join(arrays, f"{i}.{name}", *sizes[name]) for name in _MATRICES}
            layers.append(Layer(**vectors, **matrices))  # type: ignore[arg-type]
        table = (shape.vocab_size, shape.hidden_size, width)
        vocabulary = _joined(arrays, "vocabulary", *table)
        embedding = vocabulary
        if "embedding.data" in arrays:
            embedding = _joined(arrays, "embedding", *table)
        return cls(layers, vocabulary, embedding, arrays["norm"], bits)  # type: ignore[arg-type]


def _parts(name: str, matrix: Matrix) -> dict[str, npt.NDArray[np.generic]]:
    parts = _PARTS if isinstance(matrix, Packed) else _GROUPED_PARTS
    found = {part: getattr(matrix, part) for part in parts}
    return {f"{name}.{part}": array for part, array in found.items() if array is not None}


def _joined(
    arrays: Mapping[str, npt.NDArray[np.generic]], name: str, channels: int, k: int, depth: int
) -> Packed:
    parts = {part: arrays.get(f"{name}.{part}") for part in _PARTS}
    tiles = rounded(channels, 32) // 16
    return Packed(**parts, channels=channels, k=k, tiles=tiles, depth=depth)  # type: ignore[arg-type]


def _joined_groups(
    arrays: Mapping[str, npt.NDArray[np.generic]], name: str, channels: int, k: int, depth: int
) -> Grouped:
    parts = {part: arrays.get(f"{name}.{part}") for part in _GROUPED_PARTS}
    tiles, depth = rounded(channels, 32) // 16, rounded(depth, GROUP)
    return Grouped(**parts, channels=channels, k=k, tiles=tiles, depth=depth)  # type: ignore[arg-type]


def padded(tensor: torch.Tensor, width: int) -> FloatArray:
    result = np.zeros(width, dtype=np.float32)
    result[: len(tensor)] = tensor.numpy()
    return result


def pack_layer(shape: Shape, layer: LayerWeights, bits: int) -> Layer:
    width, heads, middle = widths(shape)

    def packed(weight: FloatArray, bias: FloatArray | None, depth: int) -> Matrix:
        if bits == 8:
            return Packed.of(weight, bias, depth)
        return Grouped.of(weight, bias, rounded(depth, GROUP))

    def plain(weight: torch.Tensor, bias: torch.Tensor | None, depth: int) -> Matrix:
        return packed(weight.numpy(), None if bias is None else bias.numpy(), depth)

    def maybe(vector: torch.Tensor | None) -> FloatArray | None:
        return None if vector is None else padded(vector, shape.head_dim)

    gate_up_bias = layer.gate_up_bias
    return Layer(
        attention_norm=padded(layer.attention_norm, width),
        query_norm=maybe(layer.query_norm),
        key_norm=maybe(layer.key_norm),
        mlp_norm=padded(layer.mlp_norm, width),
        qkv=plain(layer.qkv, layer.qkv_bias, width),
        output=plain(layer.output, layer.output_bias, heads),
        gate_up=packed(
            alternating(layer.gate_up.numpy()),
            None if gate_up_bias is None else alternating(gate_up_bias.numpy()),
            width,
        ),
        down=plain(layer.down, layer.down_bias, middle),
    )
