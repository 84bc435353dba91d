"""All weights of a model in the layout of the kernels, in huge pages."""

from __future__ import annotations

import mmap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from outstride.core.graph import FloatArray
from outstride.errors import CorruptModel
from outstride.ops.cpu.int4 import GROUP, Int4Matrix
from outstride.ops.cpu.int8 import Int8Matrix, rounded
from outstride.ops.cpu.weights_file import WeightsFile, write_arrays
from outstride.ops.matrix_rows import (
    DenseRows,
    LayerRows,
    MatrixRows,
    ModelRows,
    Progress,
    alternating_rows,
    pack_all,
)
from outstride.ops.weights import LayerWeights, ModelShape, ModelWeights

FORMATS = {8: "outstride int8 4", 4: "outstride int4 3"}
"""By the bits of a layer's weights; rises when the packing changes."""
HUGE_PAGE = 2 << 20

_MATRICES = ("qkv", "output", "gate_up", "down")
_VECTORS = ("attention_norm", "query_norm", "key_norm", "mlp_norm")
_PARTS = ("data", "scale", "zero", "bias")

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
    """The weights of one layer, or of a layer of a draft head."""

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
    def reserve(
        cls, shape: ModelShape, bits: int, optional: Collection[str], *, tied: bool
    ) -> PackedModel:
        """A model to be filled, all matrices in one block of huge pages, in the order of a pass.

        optional: norms and biases that each layer has, as `LayerRows.optional` lists them.
        """
        kind, sizes = (Int8Matrix if bits == 8 else Int4Matrix), _sizes(shape, bits)
        width = widths(shape)[0]
        table = (shape.vocab_size, shape.hidden_size, width)
        per_layer = sum(rounded(kind.size_of(n, depth), 64) for n, _, depth in sizes.values())
        per_table = rounded(Int8Matrix.size_of(shape.vocab_size, width), 64)
        memory, used = in_huge_pages(shape.layers * per_layer + (2 - tied) * per_table), 0

        def placed(
            kind: type[Int8Matrix | Int4Matrix], size: tuple[int, int, int], bias: bool
        ) -> Matrix:
            nonlocal used
            at, count = used, kind.size_of(size[0], size[2])
            used += rounded(count, 64)
            return kind.empty(*size, bias=bias, memory=memory[at : at + count])

        layers = []
        for _ in range(shape.layers):
            wide = {"attention_norm": width, "mlp_norm": width}
            vectors = {
                name: np.zeros(wide.get(name, shape.head_dim), dtype=np.float32)
                if name in optional or name in wide
                else None
                for name in _VECTORS
            }
            matrices = {
                name: placed(kind, sizes[name], f"{name}.bias" in optional) for name in _MATRICES
            }
            layers.append(PackedLayerWeights(**vectors, **matrices))  # type: ignore[arg-type]
        vocabulary = placed(Int8Matrix, table, False)
        embedding = vocabulary if tied else placed(Int8Matrix, table, False)
        assert isinstance(vocabulary, Int8Matrix)
        assert isinstance(embedding, Int8Matrix)
        return cls(layers, vocabulary, embedding, np.zeros(width, dtype=np.float32), bits)

    @classmethod
    def pack(
        cls,
        shape: ModelShape,
        rows: ModelRows,
        bits: int = 8,
        progress: Progress | None = None,
    ) -> PackedModel:
        """Packs the weights of a model, layer by layer, as they are read."""
        model = cls.reserve(shape, bits, rows.optional, tied=rows.head is None)
        for into, layer in zip(model.layers, rows.layers, strict=True):
            _fill_layer(into, layer, progress)
        tables: list[tuple[Matrix, MatrixRows]] = [(model.vocabulary, rows.head or rows.embedding)]
        if rows.head is not None:
            tables.append((model.embedding, rows.embedding))
        pack_all(tables, progress)
        model.norm[: len(rows.norm)] = rows.norm
        return model

    # --- the file ---------------------------------------------------------------------------------

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """All arrays of the model by the names that they have in the file."""
        found: dict[str, npt.NDArray[np.generic] | None] = {"norm": self.norm}
        for i, layer in enumerate(self.layers):
            for name in _VECTORS:
                found[f"{i}.{name}"] = getattr(layer, name)
            for name in _MATRICES:
                found |= _parts(f"{i}.{name}", getattr(layer, name))
        found |= _parts("vocabulary", self.vocabulary)
        if self.embedding is not self.vocabulary:
            found |= _parts("embedding", self.embedding)
        return {name: array for name, array in found.items() if array is not None}

    def write(self, path: Path, about: Mapping[str, str], rows: ModelRows | None = None) -> None:
        """Writes the weights and a description of their source.

        rows: the source itself. Matrices whose 4-bit codes it has are left out of the file, because
        `read` takes them from the source again.
        """
        arrays = self.arrays()
        for name in repacked_matrices(rows, self.bits):
            del arrays[f"{name}.data"]
        write_arrays(path, arrays, {**about, "format": FORMATS[self.bits]})

    @classmethod
    def read(
        cls,
        path: Path,
        shape: ModelShape,
        about: Mapping[str, str],
        bits: int = 8,
        rows: ModelRows | None = None,
    ) -> tuple[PackedModel, Mapping[str, str]]:
        """Reads what `write` wrote; raises CorruptModel if it is damaged or of other weights.

        rows: the same as for `write`.
        """
        file = WeightsFile(path)
        expected = {**about, "format": FORMATS[bits]}
        if any(file.about.get(key) != value for key, value in expected.items()):
            raise CorruptModel(f"{path} was made from other weights")
        optional = {name[2:] for name in file.names if name.startswith("0.")}
        model = cls.reserve(shape, bits, optional, tied="embedding.data" not in file.names)
        arrays, repacked = model.arrays(), repacked_matrices(rows, bits)
        for name in repacked:
            del arrays[f"{name}.data"]
        file.read_into(arrays)
        pairs: list[tuple[Matrix, MatrixRows]] = [
            (getattr(model.layers[int(name.split(".")[0])], name.split(".")[1]), source)
            for name, source in repacked.items()
        ]
        pack_all(pairs)
        return model, file.about


def repacked_matrices(rows: ModelRows | None, bits: int) -> dict[str, MatrixRows]:
    """The matrices of layers that are repacked from a file's 4-bit codes, by name ("3.qkv")."""
    if rows is None or bits != 4:
        return {}
    return {
        f"{i}.{name}": matrix
        for i, layer in enumerate(rows.layers)
        for name, matrix in layer.matrices.items()
        if matrix.block_kind is not None
    }


def dense_model(model: ModelWeights) -> ModelRows:
    """Float32 weights in memory; each layer is dropped once it is packed."""
    layers, count = model.layers, len(model.layers)
    optional = _dense_layer(layers[0]).optional if layers else set()
    return ModelRows(
        layers=(_dense_layer(layers.pop(0)) for _ in range(count)),
        optional=optional,
        embedding=DenseRows(model.embedding.numpy()),
        norm=model.norm.numpy(),
        head=None if model.head is None else DenseRows(model.head.numpy()),
    )


def pack_layer(shape: ModelShape, layer: LayerWeights, bits: int) -> PackedLayerWeights:
    """Packs a layer that is no part of a model, such as one of a draft head."""
    rows, (width, heads, middle) = _dense_layer(layer), widths(shape)
    kind, to = (Int8Matrix, 16) if bits == 8 else (Int4Matrix, GROUP)
    depths = {"qkv": width, "output": heads, "gate_up": width, "down": middle}
    packed = PackedLayerWeights(
        attention_norm=np.zeros(width, dtype=np.float32),
        query_norm=_zeros(layer.query_norm, shape.head_dim),
        key_norm=_zeros(layer.key_norm, shape.head_dim),
        mlp_norm=np.zeros(width, dtype=np.float32),
        **{
            name: kind.empty(*matrix.shape, rounded(depths[name], to), bias=name in rows.biases)
            for name, matrix in rows.matrices.items()
        },
    )
    _fill_layer(packed, rows, None)
    return packed


def padded(tensor: torch.Tensor, width: int) -> FloatArray:
    result = np.zeros(width, dtype=np.float32)
    result[: len(tensor)] = tensor.numpy()
    return result


def _zeros(like: torch.Tensor | None, width: int) -> FloatArray | None:
    return None if like is None else np.zeros(width, dtype=np.float32)


def _sizes(shape: ModelShape, bits: int) -> dict[str, tuple[int, int, int]]:
    """Channels, columns and padded columns of the matrices of a layer."""
    width, heads, middle = widths(shape)
    rows, to = shape.heads * shape.head_dim, 16 if bits == 8 else GROUP
    qkv = rows + 2 * shape.kv_heads * shape.head_dim
    return {
        "qkv": (qkv, shape.hidden_size, rounded(width, to)),
        "output": (shape.hidden_size, rows, rounded(heads, to)),
        "gate_up": (2 * middle, shape.hidden_size, rounded(width, to)),
        "down": (shape.hidden_size, shape.intermediate_size, rounded(middle, to)),
    }


def _fill_layer(into: PackedLayerWeights, layer: LayerRows, progress: Progress | None) -> None:
    for name, vector in layer.vectors.items():
        getattr(into, name)[: len(vector)] = vector
    for name, bias in layer.biases.items():
        getattr(into, name).bias[: len(bias)] = bias
    pairs = [(getattr(into, name), matrix) for name, matrix in layer.matrices.items()]
    pack_all(pairs, progress)


def _dense_layer(layer: LayerWeights) -> LayerRows:
    order = alternating_rows(len(layer.gate_up) // 2)
    biases = {name: getattr(layer, f"{name}_bias") for name in _MATRICES}
    found = {name: bias.numpy() for name, bias in biases.items() if bias is not None}
    if "gate_up" in found:
        found["gate_up"] = np.where(order < 0, np.float32(0), found["gate_up"][order])
    vectors = {name: getattr(layer, name) for name in _VECTORS}
    return LayerRows(
        matrices={
            name: DenseRows(getattr(layer, name).numpy(), order if name == "gate_up" else None)
            for name in _MATRICES
        },
        vectors={name: vector.numpy() for name, vector in vectors.items() if vector is not None},
        biases=found,
    )


def _parts(name: str, matrix: Matrix) -> dict[str, npt.NDArray[np.generic] | None]:
    return {f"{name}.{part}": getattr(matrix, part, None) for part in _PARTS}
