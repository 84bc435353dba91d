"""The weights of a model file that are read when they are needed: row by row, in any order.

The file is mapped into memory. Rows become float32 only while they are packed, so that a model never is
in memory in float32 unless a backend computes in it (`StoredModel.read`).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from outstride.core.graph import FloatArray, IntArray
from outstride.models.config import DecoderConfig, described
from outstride.models.experts import Experts
from outstride.models.weights import (
    allocate,
    check_finite,
    expert_parts,
    final_norm_factor,
    rotated_first,
)
from outstride.ops.matrix_rows import (
    LayerRows,
    ModelRows,
    Progress,
    alternating_rows,
    expert_rows,
    workers,
)

_PORTION = 1 << 18
"""About how many weights become float32 at once."""

_Source: TypeAlias = tuple[list[str], IntArray | None, bool]
"""A matrix of a layer: names of tensors without "weight", the order of their rows, whether it has a
bias."""

_NORMS = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention_post_norm": "attention_output_norm",
    "mlp_post_norm": "mlp_output_norm",
}
"""Norms of a layer as kernels and as checkpoints name them."""


class StoredTensor(ABC):
    """A tensor in a model file. name: its name in Llama checkpoints."""

    name: str
    shape: tuple[int, ...]
    block_kind: str | None = None
    """The type of its 4-bit blocks, one of `ops.matrix_rows.BLOCK_KINDS`."""
    stored_bits: float | None = None
    """Bits of a weight in the file, scales included, where it is quantized."""

    @property
    def has_codes(self) -> bool:
        """Whether `blocks` gives its 4-bit codes."""
        return False

    @abstractmethod
    def floats(self, rows: IntArray | slice) -> FloatArray:
        """Rows in float32: a copy."""

    @abstractmethod
    def raw(self) -> npt.NDArray[np.uint8]:
        """The bytes of the file: [rows, bytes]."""

    def addresses(self) -> npt.NDArray[np.uint64]:
        """Where each row's 4-bit blocks are in memory."""
        raise NotImplementedError(f"{self.name} has no 4-bit blocks")

    def blocks(self, rows: IntArray | slice) -> npt.NDArray[np.uint8]:
        """The 4-bit codes of rows as blocks of Q4_1, made for this call: [rows, bytes]."""
        raise NotImplementedError(f"{self.name} has no 4-bit codes")

    def checked(self, rows: IntArray | slice) -> FloatArray:
        """Rows in float32; an error that names the tensor if they hold NaN or infinity."""
        found = self.floats(rows)
        if found.size and not (np.isfinite(found.min()) and np.isfinite(found.max())):
            check_finite({self.name: torch.from_numpy(found)})
        return found

    def summary(self) -> bytes:
        """The XOR of all words of the file, and a sample of them in order."""
        raw = self.raw().reshape(-1)
        words = raw[: raw.size // 8 * 8].view(np.uint64)
        sample = np.ascontiguousarray(words[:: max(1, len(words) // 512)])
        total = int(np.bitwise_xor.reduce(words, initial=np.uint64(0)))
        return total.to_bytes(8, "little") + sample.tobytes() + raw[raw.size // 8 * 8 :].tobytes()


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The rows of some tensors as one matrix. Implements `ops.matrix_rows.MatrixRows`.

    order: for each channel, a row of the concatenated tensors, or -1 for zeros; None: all in order.
    factor: of all values; codes of a file are not taken as they are then.
    """

    parts: Sequence[StoredTensor]
    order: IntArray | None = None
    factor: float = 1.0
    block_kind: str | None = field(init=False)
    _ends: IntArray = field(init=False)
    """For each part, how many rows it and those before it have."""
    _addresses: npt.NDArray[np.uint64] = field(init=False)

    def __post_init__(self) -> None:
        kinds = {part.block_kind for part in self.parts}
        kind = kinds.pop() if len(kinds) == 1 and self.factor == 1 else None
        found = np.zeros(0, dtype=np.uint64)
        if kind is not None:
            found = np.concatenate([part.addresses() for part in self.parts])
            if self.order is not None:
                found = np.where(self.order < 0, np.uint64(0), found[self.order])
        ends = np.cumsum([part.shape[0] for part in self.parts])
        object.__setattr__(self, "block_kind", kind)
        object.__setattr__(self, "_ends", ends)
        object.__setattr__(self, "_addresses", found)

    @property
    def shape(self) -> tuple[int, int]:
        rows = int(self._ends[-1]) if self.order is None else len(self.order)
        return rows, self.parts[0].shape[1]

    @property
    def stored_bits(self) -> float | None:
        found = [part.stored_bits for part in self.parts if part.stored_bits is not None]
        return max(found) if len(found) == len(self.parts) else None

    def floats(self, start: int, stop: int) -> FloatArray:
        if self.order is None and len(self.parts) == 1:
            whole = self.parts[0].checked(slice(start, max(start, stop)))
            return whole if self.factor == 1 else whole * np.float32(self.factor)
        order = np.arange(start, stop) if self.order is None else self.order[start:stop]
        found = np.zeros((len(order), self.shape[1]), dtype=np.float32)
        owners = np.where(order < 0, -1, np.searchsorted(self._ends, order, side="right"))
        for owner in np.unique(owners[owners >= 0]):
            part, inside = self.parts[owner], owners == owner
            found[inside] = part.checked(order[inside] - (self._ends[owner] - part.shape[0]))
        return found if self.factor == 1 else found * np.float32(self.factor)

    def addresses(self, start: int, stop: int) -> npt.NDArray[np.uint64]:
        return self._addresses[start:stop]

    def blocks(self, start: int, stop: int) -> npt.NDArray[np.uint8] | None:
        if not all(part.has_codes for part in self.parts):
            return None
        order = np.arange(start, stop) if self.order is None else self.order[start:stop]
        found = np.zeros((len(order), self.shape[1] // 32 * 20), dtype=np.uint8)
        low = 0
        for part in self.parts:
            high = low + part.shape[0]
            inside = (order >= low) & (order < high)
            if inside.any():
                found[inside] = part.blocks(order[inside] - low)
            low = high
        return found


@dataclass(frozen=True, slots=True)
class StoredModel:
    """All tensors of a model file under their Llama names; names and shapes are checked already."""

    config: DecoderConfig
    tensors: dict[str, StoredTensor]

    def read(self, progress: Progress | None = None) -> dict[str, torch.Tensor]:
        """All tensors in float32. progress: is called with numbers of weights that were read."""
        result = allocate(self.config)

        def fill(name: str) -> None:
            stored, into = self.tensors[name], result[name]
            step = max(1, _PORTION // max(1, into[:1].numel()))
            for start in range(0, len(into), step):
                rows = stored.floats(slice(start, start + step))
                into[start : start + step] = torch.from_numpy(rows)
                if progress is not None:
                    progress(rows.size)

        with ThreadPoolExecutor(workers()) as pool:
            for _ in pool.map(fill, self.tensors):
                pass
        return result

    def digest(self) -> str:
        """Identifies the weights, by the bytes of the file: the same for every weights format."""
        digest = hashlib.sha256(described(self.config).encode())
        names = sorted(self.tensors)
        with ThreadPoolExecutor(workers()) as pool:
            found = pool.map(lambda name: self.tensors[name].summary(), names)
            for name, summary in zip(names, found, strict=True):
                digest.update(f"{name}{self.tensors[name].shape}".encode() + summary)
        return digest.hexdigest()

    def rows(self) -> ModelRows:
        """The weights as a backend packs them."""
        layers = [self._layer(i) for i in range(self.config.layers)]
        tied = self.config.tied
        return ModelRows(
            layers=layers,
            optional={name for layer in layers for name in layer.optional},
            embedding=StoredRows(
                [self.tensors["model.embed_tokens.weight"]], factor=self.config.embedding_scale
            ),
            norm=self._norm("model.norm.weight") * np.float32(final_norm_factor(self.config)),
            head=None if tied else StoredRows([self.tensors["lm_head.weight"]]),
        )

    def _vector(self, name: str) -> FloatArray:
        return self.tensors[name].checked(slice(None))

    def _norm(self, name: str) -> FloatArray:
        return self._vector(name) + np.float32(self.config.norm_offset)

    def _layer(self, index: int) -> LayerRows:
        config, at = self.config, f"model.layers.{index}."
        attention = f"{at}self_attn."
        sources: dict[str, _Source] = {
            "qkv": ([f"{attention}{n}_proj" for n in "qkv"], self._head_order(), config.qkv_bias),
            "output": ([f"{attention}o_proj"], None, config.output_bias),
        }
        mlp, inner = f"{at}mlp.", config.intermediate_size
        experts = config.experts if config.experts and config.experts.layers[index] else None
        if experts is not None:
            mlp, inner = f"{mlp}shared_experts.", experts.shared
            sources |= self._expert_sources(at, experts)
        if inner:
            parts = [f"{mlp}gate_proj", f"{mlp}up_proj"]
            sources["gate_up"] = parts, alternating_rows(inner), config.mlp_bias
            sources["down"] = [f"{mlp}down_proj"], None, config.mlp_bias
        matrices, biases = {}, {}
        for name, (parts, order, biased) in sources.items():
            matrices[name] = StoredRows([self.tensors[f"{p}.weight"] for p in parts], order)
            if biased:
                bias = np.concatenate([self._vector(f"{part}.bias") for part in parts])
                ordered = bias if order is None else np.where(order < 0, 0, bias[order])
                biases[name] = ordered.astype(np.float32)
        vectors = {
            ours: self._norm(f"{at}{theirs}.weight")
            for ours, theirs in _NORMS.items()
            if f"{at}{theirs}.weight" in self.tensors
        }
        if config.head_norms:
            for ours, theirs in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
                norm = self._norm(f"{attention}{theirs}.weight")
                vectors[ours] = norm[_rotated_order(len(norm), config)]
        if config.switches.sinks:
            vectors["sinks"] = self._vector(f"{attention}sinks")
        if experts is not None:
            vectors |= self._router(at, experts)
        return LayerRows(matrices, vectors, biases)

    def _expert_sources(self, at: str, experts: Experts) -> dict[str, _Source]:
        """The matrices of the experts of a layer."""
        config = self.config
        biased = config.mlp_bias or experts.projection_bias
        order = expert_rows(experts.count, experts.size, config.hidden_size)
        gate_up, down = ([f"{at}{name}" for name in names] for names in expert_parts(config))
        return {
            "experts.gate_up": (gate_up, order[0], biased),
            "experts.down": (down, order[1], biased),
        }

    def _router(self, at: str, experts: Experts) -> dict[str, FloatArray]:
        """What chooses the experts of a layer."""
        found = {"experts.router": self._vector(f"{at}mlp.gate.weight")}
        if experts.router_bias:
            found["experts.router_bias"] = self._vector(f"{at}mlp.gate.bias")
        if experts.bias:
            found["experts.bias"] = self._vector(f"{at}mlp.gate.expert_bias")
        if experts.shared_gate:
            found["experts.shared_gate"] = self._vector(f"{at}mlp.shared_expert_gate.weight")[0]
        return found

    def _head_order(self) -> IntArray | None:
        """The order of query, key and value rows; None: as they are."""
        config = self.config
        if config.rotary in (None, config.head_dim) and not config.interleaved_rope:
            return None
        wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
        query, key = _rotated_order(wide, config), _rotated_order(narrow, config)
        return np.concatenate([query, wide + key, np.arange(wide + narrow, wide + 2 * narrow)])


def _rotated_order(rows: int, config: DecoderConfig) -> IntArray:
    """The order of rows of heads that `rotated_first` makes."""
    order: IntArray = rotated_first(torch.arange(rows), config).numpy()
    return order
