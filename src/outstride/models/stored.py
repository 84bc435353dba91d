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

import numpy as np
import numpy.typing as npt
import torch

from outstride.core.graph import FloatArray, IntArray
from outstride.models.config import DecoderConfig
from outstride.models.weights import allocate, check_finite, rotated_first
from outstride.ops.matrix_rows import LayerRows, ModelRows, alternating_rows, workers

_PORTION = 1 << 18
"""About how many weights become float32 at once."""


class StoredTensor(ABC):
    """A tensor in a model file. name: its name in Llama checkpoints."""

    name: str
    shape: tuple[int, ...]
    block_kind: str | None = None
    """The type of its 4-bit blocks, one of `ops.matrix_rows.BLOCK_KINDS`."""

    @abstractmethod
    def floats(self, rows: IntArray | slice) -> FloatArray:
        """Rows in float32: a copy."""

    @abstractmethod
    def raw(self) -> npt.NDArray[np.uint8]:
        """The bytes of the file: [rows, bytes]."""

    def addresses(self) -> npt.NDArray[np.uint64]:
        """Where each row's 4-bit blocks are in memory."""
        raise NotImplementedError(f"{self.name} has no 4-bit blocks")

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
    """

    parts: Sequence[StoredTensor]
    order: IntArray | None = None
    block_kind: str | None = field(init=False)
    _addresses: npt.NDArray[np.uint64] = field(init=False)

    def __post_init__(self) -> None:
        kinds = {part.block_kind for part in self.parts}
        kind = kinds.pop() if len(kinds) == 1 else None
        found = np.zeros(0, dtype=np.uint64)
        if kind is not None:
            found = np.concatenate([part.addresses() for part in self.parts])
            if self.order is not None:
                found = np.where(self.order < 0, np.uint64(0), found[self.order])
        object.__setattr__(self, "block_kind", kind)
        object.__setattr__(self, "_addresses", found)

    @property
    def shape(self) -> tuple[int, int]:
        rows = sum(part.shape[0] for part in self.parts)
        return rows if self.order is None else len(self.order), self.parts[0].shape[1]

    def floats(self, start: int, stop: int) -> FloatArray:
        if self.order is None and len(self.parts) == 1:
            return self.parts[0].checked(slice(start, max(start, stop)))
        order = np.arange(start, stop) if self.order is None else self.order[start:stop]
        found = np.zeros((len(order), self.shape[1]), dtype=np.float32)
        low = 0
        for part in self.parts:
            high = low + part.shape[0]
            inside = (order >= low) & (order < high)
            if inside.any():
                found[inside] = part.checked(order[inside] - low)
            low = high
        return found

    def addresses(self, start: int, stop: int) -> npt.NDArray[np.uint64]:
        return self._addresses[start:stop]


@dataclass(frozen=True, slots=True)
class StoredModel:
    """All tensors of a model file under their Llama names; names and shapes are checked already."""

    config: DecoderConfig
    tensors: dict[str, StoredTensor]

    def read(self) -> dict[str, torch.Tensor]:
        """All tensors in float32."""
        result = allocate(self.config)

        def fill(name: str) -> None:
            stored, into = self.tensors[name], result[name]
            step = max(1, _PORTION // max(1, into[:1].numel()))
            for start in range(0, len(into), step):
                rows = stored.floats(slice(start, start + step))
                into[start : start + step] = torch.from_numpy(rows)

        with ThreadPoolExecutor(workers()) as pool:
            for _ in pool.map(fill, self.tensors):
                pass
        return result

    def digest(self) -> str:
        """Identifies the weights, by the bytes of the file: the same for every weights format."""
        digest = hashlib.sha256(repr(self.config).encode())
        names = sorted(self.tensors)
        with ThreadPoolExecutor(workers()) as pool:
            found = pool.map(lambda name: self.tensors[name].summary(), names)
            for name, summary in zip(names, found, strict=True):
                digest.update(f"{name}{self.tensors[name].shape}".encode() + summary)
        return digest.hexdigest()

    def rows(self) -> ModelRows:
        """The weights as a backend packs them; dense layers only."""
        config = self.config
        layers = [self._layer(f"model.layers.{i}.") for i in range(config.layers)]
        tied = config.tied
        return ModelRows(
            layers=layers,
            optional=layers[0].optional if layers else set(),
            embedding=StoredRows([self.tensors["model.embed_tokens.weight"]]),
            norm=self._vector("model.norm.weight"),
            head=None if tied else StoredRows([self.tensors["lm_head.weight"]]),
        )

    def _vector(self, name: str) -> FloatArray:
        return self.tensors[name].checked(slice(None))

    def _layer(self, at: str) -> LayerRows:
        config = self.config
        attention, mlp = f"{at}self_attn.", f"{at}mlp."
        sources: dict[str, tuple[list[str], IntArray | None, bool]] = {
            "qkv": ([f"{attention}{n}_proj" for n in "qkv"], self._head_order(), config.qkv_bias),
            "output": ([f"{attention}o_proj"], None, config.output_bias),
            "gate_up": (
                [f"{mlp}gate_proj", f"{mlp}up_proj"],
                alternating_rows(config.intermediate_size),
                config.mlp_bias,
            ),
            "down": ([f"{mlp}down_proj"], None, config.mlp_bias),
        }
        matrices, biases = {}, {}
        for name, (parts, order, biased) in sources.items():
            matrices[name] = StoredRows([self.tensors[f"{p}.weight"] for p in parts], order)
            if biased:
                bias = np.concatenate([self._vector(f"{part}.bias") for part in parts])
                ordered = bias if order is None else np.where(order < 0, 0, bias[order])
                biases[name] = ordered.astype(np.float32)
        vectors = {
            "attention_norm": self._vector(f"{at}input_layernorm.weight"),
            "mlp_norm": self._vector(f"{at}post_attention_layernorm.weight"),
        }
        if config.head_norms:
            order = _rotated_order(config.head_dim, config)
            vectors["query_norm"] = self._vector(f"{attention}q_norm.weight")[order]
            vectors["key_norm"] = self._vector(f"{attention}k_norm.weight")[order]
        return LayerRows(matrices, vectors, biases)

    def _head_order(self) -> IntArray | None:
        """The order of query, key and value rows; None: as they are."""
        config = self.config
        if config.rotary in (None, config.head_dim):
            return None
        wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
        query, key = _rotated_order(wide, config), _rotated_order(narrow, config)
        return np.concatenate([query, wide + key, np.arange(wide + narrow, wide + 2 * narrow)])


def _rotated_order(rows: int, config: DecoderConfig) -> IntArray:
    """The order of rows of heads that `rotated_first` makes."""
    order: IntArray = rotated_first(torch.arange(rows), config).numpy()
    return order
