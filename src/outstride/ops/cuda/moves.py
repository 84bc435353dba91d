# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""`Entries`: keys, values and what is stored beside them, and their way from slot to slot."""

from __future__ import annotations

import numpy as np
import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from outstride.core.graph import IntArray
from outstride.ops.cuda.layout import HEADER, MOVES, MOVES_AT, Words
from outstride.ops.cuda.transfer import Ring

_COLUMNS = 64


@triton.jit
def copy_kernel(pairs, keys, values, features, ld, entry, ld_features,
                WIDTH: tl.constexpr, FEATURES: tl.constexpr):  # fmt: skip
    """Entries from one slot to another, one layer and one entry to a program."""
    source = tl.load(pairs + tl.program_id(1) * 2).to(tl.int64)
    target = tl.load(pairs + tl.program_id(1) * 2 + 1).to(tl.int64)
    layer = tl.program_id(0).to(tl.int64) * ld
    k = tl.arange(0, WIDTH)
    inside = k < entry
    key = tl.load(keys + layer + source * entry + k, mask=inside)
    value = tl.load(values + layer + source * entry + k, mask=inside)
    tl.store(keys + layer + target * entry + k, key, mask=inside)
    tl.store(values + layer + target * entry + k, value, mask=inside)
    if FEATURES > 0:  # noqa: SIM102
        if tl.program_id(0) == 0:
            place = tl.arange(0, FEATURES)
            kept = tl.load(features + source * ld_features + place, mask=place < ld_features)
            tl.store(features + target * ld_features + place, kept, mask=place < ld_features)


@triton.jit
def _move(pool, source, target, here, columns, width, COUNT: tl.constexpr):
    """Some columns of all entries: read, and only then written."""
    inside = here[:, None] & (columns < width)[None, :]
    values = tl.load(pool + source[:, None] * width + columns[None, :], mask=inside)
    tl.debug_barrier()
    tl.store(pool + target[:, None] * width + columns[None, :], values, mask=inside)


@triton.jit
def move_kernel(count, pairs, keys, values, features, ld, entry, width,
                COUNT: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """One layer and some columns to a program; the layer behind the last is that of the features."""
    line = tl.arange(0, COUNT)
    here = line < tl.load(count)
    source = tl.load(pairs + line * 2, mask=here, other=0).to(tl.int64)
    target = tl.load(pairs + line * 2 + 1, mask=here, other=0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        _move(features, source, target, here, columns, width, COUNT)
    else:
        layer = tl.program_id(0).to(tl.int64) * ld
        _move(keys + layer, source, target, here, columns, entry, COUNT)
        _move(values + layer, source, target, here, columns, entry, COUNT)


class Entries:
    """The cache, and what is moved in it.

    A few entries are moved at the beginning of the next pass, which is launched anyway.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        heads: int,
        wide: int,
        features: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.keys = torch.zeros((layers, slots, heads, wide), dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.features = torch.zeros((slots, features), dtype=torch.float32, device=device)
        self._words = Ring(device, HEADER)
        self._pending: Words | None = None

    def grow(self, layers: int) -> None:
        """Room for the entries of further layers."""
        self.settle()
        for name in ("keys", "values"):
            held = getattr(self, name)
            setattr(self, name, torch.cat([held, held.new_zeros(layers, *held.shape[1:])]))

    def move(self, sources: IntArray, targets: IntArray) -> None:
        """Copies entries, all read before any is written, before anybody reads or writes them."""
        self.settle()
        pairs = np.empty((len(sources), 2), dtype=np.int32)
        pairs[:, 0], pairs[:, 1] = sources, targets
        if len(pairs) <= MOVES:
            self._pending = pairs
            return
        read, write = torch.from_numpy(pairs.astype(np.int64)).to(self.keys.device).unbind(1)
        for pool in (self.keys, self.values):
            pool.index_copy_(1, write, pool.index_select(1, read))
        if self.features.shape[1]:
            self.features.index_copy_(0, write, self.features.index_select(0, read))

    @property
    def due(self) -> bool:
        """Whether entries are to be moved before the next pass."""
        return self._pending is not None

    def enter(self, words: Words) -> bool:
        """Enters moves that are due in the header of a pass, which then must `launch` them."""
        pairs, self._pending = self._pending, None
        if pairs is None:
            return False
        words[1], words[MOVES_AT : MOVES_AT + pairs.size] = len(pairs), pairs.reshape(-1)
        return True

    def settle(self) -> None:
        """Makes moves that are due."""
        if self._pending is not None:
            words = np.zeros(HEADER, dtype=np.int32)
            self.enter(words)
            self._words.send(words)
            self.launch(self._words.words)

    def launch(self, words: torch.Tensor) -> None:
        """Makes the moves that the header of a pass names."""
        keys, features = self.keys, self.features
        entry, width = keys.shape[2] * keys.shape[3], features.shape[1]
        columns = -(-max(entry, width) // _COLUMNS)
        move_kernel[(len(keys) + 1, columns)](
            words[1:], words[MOVES_AT:], keys, self.values, features, keys.stride(0), entry, width,
            COUNT=MOVES, COLUMNS=_COLUMNS, num_warps=4,
        )  # fmt: skip

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copies entries at once; no slot is both read and written."""
        words = np.asarray(pairs, dtype=np.int32).reshape(-1)
        self._words.send(words)
        keys, features = self.keys, self.features
        entry, width = keys.shape[2] * keys.shape[3], features.shape[1]
        copy_kernel[(len(keys), len(pairs))](
            self._words.words, keys, self.values, features, keys.stride(0), entry, width,
            WIDTH=triton.next_power_of_2(entry),
            FEATURES=triton.next_power_of_2(width) if width else 0, num_warps=4,
        )  # fmt: skip
