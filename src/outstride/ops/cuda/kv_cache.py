# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""`DeviceKVCache`: keys, values and stored hidden states, and how they are copied between slots."""

from __future__ import annotations

import numpy as np
import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from outstride.core.graph import IntArray
from outstride.ops.cuda.host_io import MetadataRing
from outstride.ops.cuda.metadata import HEADER_SIZE, MAX_MOVES, HeaderField, Int32Array

_COLUMNS = 64


@triton.jit
def copy_kernel(pairs, keys, values, features, ld, row_size, ld_features,
                WIDTH: tl.constexpr, FEATURES: tl.constexpr):  # fmt: skip
    """Copies KV between slots, one layer and one slot to a program. pairs [count, 2]: from, to."""
    source = tl.load(pairs + tl.program_id(1) * 2).to(tl.int64)
    target = tl.load(pairs + tl.program_id(1) * 2 + 1).to(tl.int64)
    layer = tl.program_id(0).to(tl.int64) * ld
    k = tl.arange(0, WIDTH)
    inside = k < row_size
    key = tl.load(keys + layer + source * row_size + k, mask=inside)
    value = tl.load(values + layer + source * row_size + k, mask=inside)
    tl.store(keys + layer + target * row_size + k, key, mask=inside)
    tl.store(values + layer + target * row_size + k, value, mask=inside)
    if FEATURES > 0:  # noqa: SIM102
        if tl.program_id(0) == 0:
            place = tl.arange(0, FEATURES)
            kept = tl.load(features + source * ld_features + place, mask=place < ld_features)
            tl.store(features + target * ld_features + place, kept, mask=place < ld_features)


@triton.jit
def _move(pool, source, target, here, columns, width, COUNT: tl.constexpr):
    """Some columns of all slots: read, and only then written."""
    inside = here[:, None] & (columns < width)[None, :]
    values = tl.load(pool + source[:, None] * width + columns[None, :], mask=inside)
    tl.debug_barrier()
    tl.store(pool + target[:, None] * width + columns[None, :], values, mask=inside)


@triton.jit
def move_kernel(count, pairs, keys, values, features, ld, row_size, width,
                COUNT: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """One layer and some columns to a program; the layer after the last is that of the features."""
    line = tl.arange(0, COUNT)
    here = line < tl.load(count)
    source = tl.load(pairs + line * 2, mask=here, other=0).to(tl.int64)
    target = tl.load(pairs + line * 2 + 1, mask=here, other=0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        _move(features, source, target, here, columns, width, COUNT)
    else:
        layer = tl.program_id(0).to(tl.int64) * ld
        _move(keys + layer, source, target, here, columns, row_size, COUNT)
        _move(values + layer, source, target, here, columns, row_size, COUNT)


class DeviceKVCache:
    """The KV cache of one model, and the copies between its slots.

    A few slots are copied at the beginning of the next pass, which is launched anyway.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        head_width: int,
        features: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        # keys, values: [layers, slots, kv heads, padded head size]; features: [slots, width]
        self.keys = torch.zeros((layers, slots, kv_heads, head_width), dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.features = torch.zeros((slots, features), dtype=torch.float32, device=device)
        self._words = MetadataRing(device, HEADER_SIZE)
        self._pending: Int32Array | None = None

    def grow(self, layers: int) -> None:
        """Adds layers to the cache: those of a draft head."""
        self.flush()
        for name in ("keys", "values"):
            held = getattr(self, name)
            setattr(self, name, torch.cat([held, held.new_zeros(layers, *held.shape[1:])]))

    def move(self, sources: IntArray, targets: IntArray) -> None:
        """Copies KV between slots, all read before any is written, before the next pass uses them."""
        self.flush()
        pairs = np.empty((len(sources), 2), dtype=np.int32)
        pairs[:, 0], pairs[:, 1] = sources, targets
        if len(pairs) <= MAX_MOVES:
            self._pending = pairs
            return
        read, write = torch.from_numpy(pairs.astype(np.int64)).to(self.keys.device).unbind(1)
        for pool in (self.keys, self.values):
            pool.index_copy_(1, write, pool.index_select(1, read))
        if self.features.shape[1]:
            self.features.index_copy_(0, write, self.features.index_select(0, read))

    @property
    def has_pending(self) -> bool:
        """Whether slots are to be copied before the next pass."""
        return self._pending is not None

    def write_moves(self, words: Int32Array) -> bool:
        """Writes pending copies into the header of a pass, which then must `launch` them."""
        pairs, self._pending = self._pending, None
        if pairs is None:
            return False
        at = HeaderField.MOVES
        words[HeaderField.NUM_MOVES], words[at : at + pairs.size] = len(pairs), pairs.reshape(-1)
        return True

    def flush(self) -> None:
        """Makes pending copies now."""
        if self._pending is not None:
            words = np.zeros(HEADER_SIZE, dtype=np.int32)
            self.write_moves(words)
            self._words.send(words)
            self.launch(self._words.words)

    def launch(self, words: torch.Tensor) -> None:
        """Makes the copies that the header of a pass names."""
        keys, features = self.keys, self.features
        row_size, width = keys.shape[2] * keys.shape[3], features.shape[1]
        columns = -(-max(row_size, width) // _COLUMNS)
        move_kernel[(len(keys) + 1, columns)](
            words[HeaderField.NUM_MOVES :], words[HeaderField.MOVES :], keys, self.values,
            features, keys.stride(0), row_size, width,
            COUNT=MAX_MOVES, COLUMNS=_COLUMNS, num_warps=4,
        )  # fmt: skip

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copies KV at once; no slot is both read and written."""
        words = np.asarray(pairs, dtype=np.int32).reshape(-1)
        self._words.send(words)
        keys, features = self.keys, self.features
        row_size, width = keys.shape[2] * keys.shape[3], features.shape[1]
        copy_kernel[(len(keys), len(pairs))](
            self._words.words, keys, self.values, features, keys.stride(0), row_size, width,
            WIDTH=triton.next_power_of_2(row_size),
            FEATURES=triton.next_power_of_2(width) if width else 0, num_warps=4,
        )  # fmt: skip
