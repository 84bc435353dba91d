"""GGUF files: metadata, shapes and tensors, with an error for everything that is wrong in a file.

The header is parsed here, because the reader of the `gguf` package makes objects of each of 50,000
vocabulary entries, which takes seconds.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from outstride.core.graph import FloatArray, IntArray
from outstride.errors import CorruptModel, UnsupportedModel
from outstride.models.config import DecoderConfig, RopeConfig, unsupported
from outstride.models.families import FAMILIES
from outstride.models.stored import StoredModel, StoredTensor
from outstride.models.weights import check_shape
from outstride.ops.cpu import native
from outstride.ops.matrix_rows import BLOCK_KINDS, DEQUANTIZED_KINDS

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape (in torch's order), type and offset of a tensor."""

    shape: tuple[int, ...]
    kind: int
    offset: int


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
        if inner in _SCALARS:
            code = _SCALARS[inner]
            found = np.frombuffer(
                self.data, dtype=np.dtype("<" + code), count=count, offset=self.at
            )
            self.at += found.nbytes
            return found.tolist()
        return (
            self._strings(count) if inner == _STRING else [self.value(inner) for _ in range(count)]
        )

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


class GgufFile:
    """An open file: `metadata` by key, `tensors` by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.stat().st_size < 24:
            raise CorruptModel(f"{path} is cut off: it is too short to be a GGUF file")
        with path.open("rb") as file:
            self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(memoryview(self._mapped))
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
        self.tensors: dict[str, TensorInfo] = {}
        for _ in range(count):
            name, rank = cursor.string(), cursor.take("I")
            shape = tuple(cursor.take("Q") for _ in range(rank))[::-1]
            self.tensors[name] = TensorInfo(shape, cursor.take("I"), cursor.take("Q"))
        step = int(self.metadata.get("general.alignment", 32))
        self._start = -(-cursor.at // step) * step

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "unknown"))

    def get(self, key: str, default: Any = None) -> Any:
        """A value that belongs to the architecture, such as `block_count`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        """A value that belongs to the architecture; an error if it is missing."""
        value = self.get(key)
        if value is None:
            raise CorruptModel(f"{self.path} lacks the key {self.architecture}.{key}")
        return value

    def tensor(self, name: str, stored_as: str = "", order: IntArray | None = None) -> GgufTensor:
        """A tensor of the file. stored_as: its checkpoint name. order: of its rows, if another."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        info = self.tensors[name]
        try:
            kind = GGMLQuantizationType(info.kind)
            per_block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise UnsupportedModel(
                f"{name} in {self.path} has the unknown type {info.kind}"
            ) from error
        count = math.prod(info.shape)
        if info.shape[-1] % per_block:
            raise CorruptModel(f"{name} in {self.path} has rows that are not whole blocks")
        start, size = self._start + info.offset, count // per_block * block_bytes
        if start + size > len(self._mapped):
            raise CorruptModel(f"{self.path} is cut off: {name} reaches beyond its end")
        raw = np.frombuffer(self._mapped, dtype=np.uint8, count=size, offset=start)
        rows = info.shape[0]
        return GgufTensor(
            stored_as or name,
            info.shape,
            kind,
            raw.reshape(rows, -1),
            order,
            f"{name} in {self.path}",
        )


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


def read_config(file: GgufFile) -> DecoderConfig:
    """The config of the decoder, from the metadata and the names of the tensors."""
    architecture = file.architecture
    family = FAMILIES.get(architecture)
    if family is None or not family.gguf:
        raise unsupported(architecture, [name for name, kind in FAMILIES.items() if kind.gguf])
    if file.get("expert_count", 0):
        raise UnsupportedModel(f"{file.path} is a mixture of experts, which is not supported")
    layers, heads = int(file.need("block_count")), int(file.need("attention.head_count"))
    hidden = int(file.need("embedding_length"))
    head_dim = int(file.get("attention.key_length") or file.get("rope.dimension_count") or 0)
    head_dim = head_dim or hidden // heads
    if int(file.get("rope.dimension_count") or head_dim) != head_dim:
        raise UnsupportedModel("partial rotary embeddings are not supported")
    if "token_embd.weight" not in file.tensors:
        raise CorruptModel(f"the tensor 'token_embd.weight' is missing in {file.path}")
    window = file.get("attention.sliding_window") or None
    return DecoderConfig(
        architecture=architecture,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=int(file.need("feed_forward_length")),
        layers=layers,
        heads=heads,
        kv_heads=int(file.get("attention.head_count_kv") or heads),
        head_dim=head_dim,
        context=int(file.need("context_length")),
        norm_eps=float(file.need("attention.layer_norm_rms_epsilon")),
        rope=_rope(file),
        rope_layers=family.rope_layers({}, layers),
        windows=(None if window is None else int(window),) * layers,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        head_norms="blk.0.attn_q_norm.weight" in file.tensors,
        tied="output.weight" not in file.tensors,
    )


def _rope(file: GgufFile) -> RopeConfig:
    theta = float(file.get("rope.freq_base", 10000.0))
    factors = None
    if _FACTORS in file.tensors:
        factors = tuple(float(x) for x in file.tensor(_FACTORS).floats(slice(None)))
    kind = str(file.get("rope.scaling.type") or "none")
    factor = float(file.get("rope.scaling.factor") or 1.0)
    if kind == "none" or factors is not None:
        return RopeConfig(theta=theta, factors=factors)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    if kind != "yarn":
        raise UnsupportedModel(
            f"rope scaling {kind!r} is not supported; supported are linear, yarn"
        )
    stated = file.get("rope.scaling.yarn_attn_factor") or file.get("rope.scaling.attn_factor")
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_context=int(
            file.get("rope.scaling.original_context_length") or file.need("context_length")
        ),
        beta_fast=float(file.get("rope.scaling.yarn_beta_fast") or 32.0),
        beta_slow=float(file.get("rope.scaling.yarn_beta_slow") or 1.0),
        attention_factor=None if stated is None else float(stated),
    )


def _checkpoint_name(name: str) -> str:
    """The name that a tensor has in a checkpoint, or its own if it has none."""
    if name in _OUTER:
        return _OUTER[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _NAMES:
        return f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.{parts[3]}"
    return name


def _restore_rows(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Undoes the converter's order, in which pairs of rotated dimensions are adjacent rows."""
    shape = tensor.shape
    half = shape[0] // heads // 2
    return tensor.view(heads, half, 2, *shape[1:]).transpose(1, 2).reshape(shape)


def stored_model(file: GgufFile, config: DecoderConfig) -> StoredModel:
    """All tensors of a file under their checkpoint names; an error if one is missing or unknown."""
    names = {name: _checkpoint_name(name) for name in file.tensors if name != _FACTORS}
    shapes: Mapping[str, tuple[int, ...]] = config.shapes()
    found = set(names.values())
    if missing := sorted(set(shapes) - found):
        raise CorruptModel(f"the tensor {missing[0]!r} is missing in {file.path}")
    tensors: dict[str, StoredTensor] = {}
    for name, ours in names.items():
        if ours not in shapes:
            raise CorruptModel(f"the tensor {name!r} in {file.path} is not part of the model")
        check_shape(name, file.tensors[name].shape, shapes[ours])
        heads = {".q_proj.": config.heads, ".k_proj.": config.kv_heads}
        permuted = [n for part, n in heads.items() if part in ours]
        order = None
        if permuted and FAMILIES[config.architecture].gguf_permuted:
            order = _restore_rows(torch.arange(shapes[ours][0]), permuted[0]).numpy()
        tensors[ours] = file.tensor(name, ours, order)
    return StoredModel(config, tensors)
