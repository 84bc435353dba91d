"""All weights of a model in the layout of the kernels, and the file that caches them between starts."""

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
from outstride.ops.cpu.int4 import GROUP, Int4Matrix
from outstride.ops.cpu.int8 import Int8Matrix, alternating, rounded
from outstride.ops.weights import LayerWeights, ModelShape, ModelWeights

FORMATS = {8: "outstride int8 3", 4: "outstride int4 2"}
"""By the bits of a layer's weights; rises when the packing changes."""
HUGE_PAGE = 2 << 20

_MATRICES = ("qkv", "output", "gate_up", "down")
_VECTORS = ("attention_norm", "query_norm", "key_norm", "mlp_norm")
_PARTS = ("data", "scale", "zero", "bias")
_GROUPED_PARTS = ("data", "bias")

Matrix: TypeAlias = Int8Matrix | Int4Matrix


def widths(shape: ModelShape) -> tuple[int, int, int]:
    """The padded widths of hidden states, of all heads together, and of the MLP's inner rows."""
    return (
        rounded(shape.hidden_size, 32),
        rounded(shape.heads * shape.head_dim, 16),
        rounded(shape.intermediate_size, 16),
    )


@dataclass(slots=True)
class PackedLayerWeights:
    """The weights of one layer."""

    attention_norm: FloatArray
    query_norm: FloatArray | None
    key_norm: FloatArray | None
    mlp_norm: FloatArray
    qkv: Matrix
    output: Matrix
    gate_up: Matrix
    down: Matrix


def matrices_of(layers: Sequence[PackedLayerWeights]) -> list[Matrix]:
    """All matrices in the order in which a pass reads them."""
    return [getattr(layer, name) for layer in layers for name in _MATRICES]


def in_huge_pages(size: int) -> npt.NDArray[np.uint8]:
    """Zeros in huge pages of 2 MB, where the system has them; memory is used once it is written.

    A pass reads all weights and the KV cache, and with small pages it spends much time on TLB misses.
    """
    reserved = rounded(size, HUGE_PAGE) + HUGE_PAGE
    memory = mmap.mmap(-1, reserved, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = np.frombuffer(memory, dtype=np.uint8)
    at = -buffer.ctypes.data % HUGE_PAGE
    return buffer[at : at + size]


def into_huge_pages(matrices: Sequence[Matrix]) -> None:
    """Moves matrices, in this order, into one block of huge pages."""
    buffer, at = in_huge_pages(sum(rounded(matrix.data.size, 64) for matrix in matrices)), 0
    for matrix in matrices:
        matrix.move(buffer[at : at + matrix.data.size])
        at += rounded(matrix.data.size, 64)


@dataclass(slots=True)
class PackedModel:
    """The weights of a model; with tied embeddings, `embedding` is `vocabulary`.

    bits: of the weights of layers. Embedding and LM head always have 8: an LM head of 4 bits would
    save little time and lose accuracy.
    """

    layers: list[PackedLayerWeights]
    vocabulary: Int8Matrix
    embedding: Int8Matrix
    norm: FloatArray
    bits: int = 8

    @classmethod
    def pack(cls, model: ModelWeights, bits: int = 8) -> PackedModel:
        """Packs float32 weights; layers are converted and dropped one by one to save memory."""
        shape, layers = model.shape, []
        width = widths(shape)[0]
        while model.layers:
            layers.append(pack_layer(shape, model.layers.pop(0), bits))
        table = model.embedding if model.head is None else model.head
        vocabulary = Int8Matrix.of(table.numpy(), None, width)
        embedding = vocabulary
        if model.head is not None:
            embedding = Int8Matrix.of(model.embedding.numpy(), None, width)
        return cls(layers, vocabulary, embedding, padded(model.norm, width), bits)

    def into_huge_pages(self) -> None:
        """Moves all matrices into huge pages."""
        own = [self.embedding] * (self.embedding is not self.vocabulary)
        into_huge_pages([*matrices_of(self.layers), self.vocabulary, *own])

    # --- the file ---------------------------------------------------------------------------------

    def write(self, path: Path, about: Mapping[str, str]) -> None:
        """Writes the weights with a checksum of each array and a description of their source."""
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
        cls, path: Path, shape: ModelShape, about: Mapping[str, str], bits: int = 8
    ) -> tuple[PackedModel, Mapping[str, str]]:
        """Reads what `write` wrote; raises CorruptModel if it is damaged or of other weights."""
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
        cls, arrays: Mapping[str, npt.NDArray[np.generic]], shape: ModelShape, bits: int
    ) -> PackedModel:
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
            layers.append(PackedLayerWeights(**vectors, **matrices))  # type: ignore[arg-type]
        table = (shape.vocab_size, shape.hidden_size, width)
        vocabulary = _joined(arrays, "vocabulary", *table)
        embedding = vocabulary
        if "embedding.data" in arrays:
            embedding = _joined(arrays, "embedding", *table)
        return cls(layers, vocabulary, embedding, arrays["norm"], bits)  # type: ignore[arg-type]


def _parts(name: str, matrix: Matrix) -> dict[str, npt.NDArray[np.generic]]:
    parts = _PARTS if isinstance(matrix, Int8Matrix) else _GROUPED_PARTS
    found = {part: getattr(matrix, part) for part in parts}
    return {f"{name}.{part}": array for part, array in found.items() if array is not None}


def _joined(
    arrays: Mapping[str, npt.NDArray[np.generic]], name: str, channels: int, k: int, depth: int
) -> Int8Matrix:
    parts = {part: arrays.get(f"{name}.{part}") for part in _PARTS}
    tiles = rounded(channels, 32) // 16
    return Int8Matrix(**parts, channels=channels, k=k, tiles=tiles, depth=depth)  # type: ignore[arg-type]


def _joined_groups(
    arrays: Mapping[str, npt.NDArray[np.generic]], name: str, channels: int, k: int, depth: int
) -> Int4Matrix:
    parts = {part: arrays.get(f"{name}.{part}") for part in _GROUPED_PARTS}
    tiles, depth = rounded(channels, 32) // 16, rounded(depth, GROUP)
    return Int4Matrix(**parts, channels=channels, k=k, tiles=tiles, depth=depth)  # type: ignore[arg-type]


def padded(tensor: torch.Tensor, width: int) -> FloatArray:
    result = np.zeros(width, dtype=np.float32)
    result[: len(tensor)] = tensor.numpy()
    return result


def pack_layer(shape: ModelShape, layer: LayerWeights, bits: int) -> PackedLayerWeights:
    width, heads, middle = widths(shape)

    def packed(weight: FloatArray, bias: FloatArray | None, depth: int) -> Matrix:
        if bits == 8:
            return Int8Matrix.of(weight, bias, depth)
        return Int4Matrix.of(weight, bias, rounded(depth, GROUP))

    def plain(weight: torch.Tensor, bias: torch.Tensor | None, depth: int) -> Matrix:
        return packed(weight.numpy(), None if bias is None else bias.numpy(), depth)

    def maybe(vector: torch.Tensor | None) -> FloatArray | None:
        return None if vector is None else padded(vector, shape.head_dim)

    gate_up_bias = layer.gate_up_bias
    return PackedLayerWeights(
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
