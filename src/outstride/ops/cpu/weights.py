"""All weights of a model in the layout of the kernels, in huge pages."""

from __future__ import annotations

import mmap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from outstride.core.graph import FloatArray
from outstride.errors import CorruptModel
from outstride.ops.cpu.experts import (
    EXPERT_MATRICES,
    EXPERT_VECTORS,
    Matrix,
    PackedExperts,
    expert_sizes,
)
from outstride.ops.cpu.float_rows import MATRICES, VECTORS, dense_layer
from outstride.ops.cpu.int4 import GROUP, Int4Matrix
from outstride.ops.cpu.int8 import Int8Matrix, rounded
from outstride.ops.cpu.weights_file import WeightsFile, write_arrays
from outstride.ops.matrix_rows import (
    LayerRows,
    MatrixRows,
    ModelRows,
    Progress,
    pack_all,
)
from outstride.ops.weights import LayerWeights, ModelShape

FORMATS = {8: "outstride int8 4", 4: "outstride int4 3"}
"""By the bits of a layer's weights; rises when the packing changes."""
HUGE_PAGE = 2 << 20
MAX_BITS = 5.0
"""Of a weight in a file, scales included, up to which a model of 4 bits takes it in 4 bits. A weight of
Q4_1 has 5, one of Q6_K 6.6."""

_PARTS = ("data", "scale", "zero", "bias")


def widths(shape: ModelShape) -> tuple[int, int, int]:
    """The padded widths of hidden states, of all heads together, and of the widest MLP inside.

    Shared experts count as MLPs, other experts do not.
    """
    shared = shape.experts.shared if shape.experts is not None else 0
    return (
        rounded(shape.hidden_size, 32),
        rounded(shape.heads * shape.head_dim, 16),
        rounded(max(shape.intermediate_size, shared), 16),
    )


@dataclass(slots=True)
class PackedLayerWeights:
    """The weights of one layer, or of a layer of a draft head.

    In a layer with experts, `gate_up` and `down` are the shared expert, of no channels if there is
    none.
    """

    attention_norm: FloatArray
    query_norm: FloatArray | None
    key_norm: FloatArray | None
    mlp_norm: FloatArray
    qkv: Matrix
    output: Matrix
    gate_up: Matrix
    down: Matrix
    experts: PackedExperts | None = None
    attention_post_norm: FloatArray | None = None
    mlp_post_norm: FloatArray | None = None
    sinks: FloatArray | None = None

    @property
    def matrix_names(self) -> tuple[str, ...]:
        """Attributes of the matrices that it has, in the order in which a pass reads them."""
        names = tuple(name for name in MATRICES if getattr(self, name).tiles)
        return names if self.experts is None else names + EXPERT_MATRICES

    @property
    def vector_names(self) -> tuple[str, ...]:
        """Attributes of norms and routers; what they name may be None."""
        return VECTORS if self.experts is None else VECTORS + EXPERT_VECTORS


def matrices_of(layers: Sequence[PackedLayerWeights]) -> list[Matrix]:
    """All matrices of dense layers in the order in which a pass reads them."""
    return [getattr(layer, name) for layer in layers for name in MATRICES]


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

    bits: of the weights of layers, except for those matrices that `precise_matrices` keeps in 8.
    Embedding and LM head always have 8: an LM head of 4 bits would save little time and lose accuracy.
    """

    layers: list[PackedLayerWeights]
    vocabulary: Int8Matrix
    embedding: Int8Matrix
    norm: FloatArray
    bits: int = 8

    @classmethod
    def reserve(
        cls,
        shape: ModelShape,
        bits: int,
        optional: Collection[str],
        *,
        tied: bool,
        precise: Collection[str] = (),
    ) -> PackedModel:
        """A model to be filled, all matrices in one block of huge pages, in the order of a pass.

        optional: norms, routers and biases of all layers, as `ModelRows.optional` lists them.
        precise: matrices of 8 bits in a model of 4 ("3.down").
        """

        def kind_of(name: str) -> type[Int8Matrix | Int4Matrix]:
            return Int8Matrix if bits == 8 or name in precise else Int4Matrix

        sizes = [_sizes(shape, bits, layer) for layer in range(shape.layers)]
        width = widths(shape)[0]
        table = (shape.vocab_size, shape.hidden_size, width)
        total = sum(
            rounded(kind_of(f"{i}.{name}").size_of(channels, depth), 64)
            for i, layer in enumerate(sizes)
            for name, (channels, _, depth) in layer.items()
        )
        per_table = rounded(Int8Matrix.size_of(shape.vocab_size, width), 64)
        memory, used = in_huge_pages(total + (2 - tied) * per_table), 0

        def placed(
            kind: type[Int8Matrix | Int4Matrix], size: tuple[int, int, int], bias: bool
        ) -> Matrix:
            nonlocal used
            at, count = used, kind.size_of(size[0], size[2])
            used += rounded(count, 64)
            return kind.empty(*size, bias=bias, memory=memory[at : at + count] if count else None)

        layers = []
        for i, layer in enumerate(sizes):
            matrices = {
                name: placed(kind_of(f"{i}.{name}"), size, f"{name}.bias" in optional)
                for name, size in layer.items()
            }
            layers.append(_reserved_layer(shape, optional, matrices))
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
        precise = precise_matrices(rows, bits)
        model = cls.reserve(shape, bits, rows.optional, tied=rows.head is None, precise=precise)
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
            for name in layer.vector_names:
                found[f"{i}.{name}"] = attrgetter(name)(layer)
            for name in layer.matrix_names:
                found |= _parts(f"{i}.{name}", attrgetter(name)(layer))
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
        optional = {name.split(".", 1)[1] for name in file.names if name[0].isdigit()}
        tied, precise = "embedding.data" not in file.names, precise_matrices(rows, bits)
        model = cls.reserve(shape, bits, optional, tied=tied, precise=precise)
        arrays, repacked = model.arrays(), repacked_matrices(rows, bits)
        for name in repacked:
            del arrays[f"{name}.data"]
        file.read_into(arrays)
        pairs: list[tuple[Matrix, MatrixRows]] = [
            (attrgetter(name.split(".", 1)[1])(model.layers[int(name.split(".")[0])]), source)
            for name, source in repacked.items()
        ]
        pack_all(pairs)
        return model, file.about


def repacked_matrices(rows: ModelRows | None, bits: int) -> dict[str, MatrixRows]:
    """The matrices of layers that are repacked from a file's 4-bit codes, by name ("3.qkv")."""
    if bits != 4:
        return {}
    found = _layer_matrices(rows)
    return {name: matrix for name, matrix in found.items() if matrix.block_kind is not None}


def precise_matrices(rows: ModelRows | None, bits: int) -> set[str]:
    """The matrices that a model of 4 bits keeps in 8, by name: those with more bits in the file.

    Files of mixed types, such as Q4_K_M, store the matrices that need it in more bits. A file without
    any 4-bit codes has made no such choice; all of its matrices get 4 bits.
    """
    if bits != 4:
        return set()
    found = _layer_matrices(rows)
    if all(matrix.block_kind is None for matrix in found.values()):
        return set()
    return {name for name, matrix in found.items() if (matrix.stored_bits or 0) > MAX_BITS}


def _layer_matrices(rows: ModelRows | None) -> dict[str, MatrixRows]:
    """The matrices of all layers; none of a source that can be read only once."""
    if rows is None or not isinstance(rows.layers, Sequence):
        return {}
    return {
        f"{i}.{name}": matrix
        for i, layer in enumerate(rows.layers)
        for name, matrix in layer.matrices.items()
    }


def pack_layer(shape: ModelShape, layer: LayerWeights, bits: int) -> PackedLayerWeights:
    """Packs a layer that is no part of a model, such as one of a draft head."""
    rows, (width, heads, middle) = dense_layer(layer), widths(shape)
    kind, to = (Int8Matrix, 16) if bits == 8 else (Int4Matrix, GROUP)
    depths = {"qkv": width, "output": heads, "gate_up": width, "down": middle}

    def empty(name: str) -> Matrix:
        shape, depth = rows.matrices[name].shape, rounded(depths[name], to)
        return kind.empty(*shape, depth, bias=name in rows.biases)

    packed = PackedLayerWeights(
        attention_norm=np.zeros(width, dtype=np.float32),
        query_norm=_zeros(layer.query_norm, shape.head_dim),
        key_norm=_zeros(layer.key_norm, shape.head_dim),
        mlp_norm=np.zeros(width, dtype=np.float32),
        qkv=empty("qkv"),
        output=empty("output"),
        gate_up=empty("gate_up"),
        down=empty("down"),
    )
    _fill_layer(packed, rows, None)
    return packed


def padded(tensor: torch.Tensor, width: int) -> FloatArray:
    result = np.zeros(width, dtype=np.float32)
    result[: len(tensor)] = tensor.numpy()
    return result


def _zeros(like: torch.Tensor | None, width: int) -> FloatArray | None:
    return None if like is None else np.zeros(width, dtype=np.float32)


def _reserved_layer(
    shape: ModelShape, optional: Collection[str], matrices: Mapping[str, Matrix]
) -> PackedLayerWeights:
    """A layer to be filled, of these matrices."""
    width = widths(shape)[0]
    heads = (shape.heads, shape.kv_heads) if shape.wide_norms else (1, 1)
    norms = [count * shape.head_dim for count in heads]
    experts = None
    if shape.experts is not None and EXPERT_MATRICES[0] in matrices:
        activation = shape.switches.expert_activation
        experts = PackedExperts.empty(shape.experts, width, optional, matrices, activation)
    return PackedLayerWeights(
        attention_norm=np.zeros(width, dtype=np.float32),
        query_norm=_reserved("query_norm", optional, norms[0]),
        key_norm=_reserved("key_norm", optional, norms[1]),
        mlp_norm=np.zeros(width, dtype=np.float32),
        qkv=matrices["qkv"],
        output=matrices["output"],
        gate_up=matrices["gate_up"],
        down=matrices["down"],
        attention_post_norm=_reserved("attention_post_norm", optional, width),
        mlp_post_norm=_reserved("mlp_post_norm", optional, width),
        sinks=_reserved("sinks", optional, shape.heads),
        experts=experts,
    )


def _reserved(name: str, optional: Collection[str], width: int) -> FloatArray | None:
    return np.zeros(width, dtype=np.float32) if name in optional else None


def _sizes(shape: ModelShape, bits: int, layer: int) -> dict[str, tuple[int, int, int]]:
    """Channels, columns and padded columns of the matrices of a layer."""
    hidden, (width, heads, _) = shape.hidden_size, widths(shape)
    rows, to = shape.heads * shape.head_dim, 16 if bits == 8 else GROUP
    qkv = rows + 2 * shape.kv_heads * shape.head_dim
    experts = shape.experts if shape.experts is not None and shape.experts.layers[layer] else None
    inner = shape.intermediate_size if experts is None else experts.shared
    middle = rounded(inner, 16)
    sizes = {
        "qkv": (qkv, hidden, rounded(width, to)),
        "output": (hidden, rows, rounded(heads, to)),
        "gate_up": (2 * middle, hidden, rounded(width, to)),
        "down": (hidden if inner else 0, inner, max(rounded(middle, to), to)),
    }
    return sizes if experts is None else sizes | expert_sizes(experts, hidden, width, to)


def _fill_layer(into: PackedLayerWeights, layer: LayerRows, progress: Progress | None) -> None:
    for name, vector in layer.vectors.items():
        attrgetter(name)(into)[..., : vector.shape[-1]] = vector
    for name, bias in layer.biases.items():
        attrgetter(name)(into).bias[: len(bias)] = bias
    pairs = [(attrgetter(name)(into), matrix) for name, matrix in layer.matrices.items()]
    pack_all(pairs, progress)


def _parts(name: str, matrix: Matrix) -> dict[str, npt.NDArray[np.generic] | None]:
    return {f"{name}.{part}": getattr(matrix, part, None) for part in _PARTS}
