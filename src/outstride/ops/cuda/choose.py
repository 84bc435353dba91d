# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""The choice of tokens on the card: the rule of `core.sampling`, bit for bit where it has bits.

One token a row, or the few best of each; the latter are taken one after the other by keys that hold
the sum of logit and noise and, below it, the id, so that no two are equal and ties go to the lowest.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from outstride.core.graph import IntArray
from outstride.core.sampling import Draw
from outstride.ops.cuda.filters import Filters
from outstride.ops.cuda.layout import BEST, HEAD_ROWS, PLACES
from outstride.ops.cuda.noise import gumbel, over, rank, unrank

_PLACES = tl.constexpr(PLACES)
_ROWS = tl.constexpr(HEAD_ROWS)
_BEST = tl.constexpr(BEST)
_CHUNK = 4096
COUNT, POSITION = 2, 8
"""Which words of a draw are how many tokens are wanted (0: one) and its position."""
_NOBODY = tl.constexpr(-(1 << 63))
"""Below all keys."""
_FORBIDDEN = tl.constexpr(-2139095041)
"""The rank of minus infinity."""
_LAST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _sums(logits, draw, bars, row, ids, vocab, ld, CHUNK: tl.constexpr):
    """What is compared: logits, or sums of logits and noise of those above the bar."""
    temperature = tl.load(draw).to(tl.float32, bitcast=True)
    inside = ids < vocab
    x = tl.load(logits + row.to(tl.int64) * ld + ids, mask=inside, other=float("-inf"))
    if temperature > 0:
        x = over(x, temperature, CHUNK)
        bar, tie = tl.load(bars + row * 2), tl.load(bars + row * 2 + 1)
        filtered = tl.load(draw + 9)
        place = rank(x)
        x = tl.where(
            (filtered == 0) | (place > bar) | ((place == bar) & (ids <= tie)), x, float("-inf")
        )
        x += gumbel(
            ids,
            tl.load(draw + 8).to(tl.uint32),
            tl.load(draw + 6).to(tl.uint32),
            tl.load(draw + 7).to(tl.uint32),
            tl.load(draw + 4).to(tl.uint32),
            tl.load(draw + 5).to(tl.uint32),
        )
    return tl.where(inside, x, float("-inf"))


@triton.jit
def choose_kernel(
    logits, draws, bars, best, replies, reply, part_values, part_ids, tickets, ld, vocab,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """The id with the largest logit, or sum of logit and noise, among those above the bar.

    It goes to `best` for the pass behind this one, and to the host's memory: `reply` says where.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _sums(logits, draws + row * _PLACES, bars, row, ids, vocab, ld, CHUNK)
    top = tl.max(x, axis=0)
    winner = tl.min(tl.where((x == top) & (ids < vocab), ids, vocab), axis=0)
    at = row * CHUNKS + chunk
    tl.store(part_values + at, top)
    tl.store(part_ids + at, winner)
    tl.debug_barrier()
    if tl.atomic_add(tickets + row, 1, sem="acq_rel", scope="gpu") == CHUNKS - 1:
        k = tl.arange(0, ROUND)
        at_all = row * CHUNKS + k
        tops = tl.load(
            part_values + at_all, mask=k < CHUNKS, other=float("-inf"), cache_modifier=".cg"
        )
        winners = tl.load(part_ids + at_all, mask=k < CHUNKS, other=vocab, cache_modifier=".cg")
        top = tl.max(tops, axis=0)
        winner = tl.min(tl.where(tops == top, winners, vocab), axis=0)
        winner = tl.where(winner < vocab, winner, 0)
        tl.store(best + row, winner)
        tl.store(replies + (tl.load(reply) * _ROWS + row) * _BEST, winner)
        tl.store(tickets + row, 0)


@triton.jit
def several_kernel(
    logits, draws, bars, best, replies, sums, reply, picked, picked_sums, parts, tickets, ld, vocab,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ROUND: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """The same for as many ids of each row as its draw says, best first; -1 stands for no more.

    With SUMS, what was compared goes to the host as well, and both stay on the card (`picked`).
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    draw = draws + row * _PLACES
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _sums(logits, draw, bars, row, ids, vocab, ld, CHUNK)
    keys = (rank(x).to(tl.int64) << 32) | (ids ^ _LAST).to(tl.int64)
    keys = tl.where(ids < vocab, keys, _NOBODY)
    wanted = tl.maximum(tl.load(draw + 2), 1)
    mine = parts + (row * CHUNKS + chunk) * _BEST
    for i in range(wanted):
        top = tl.max(keys, axis=0)
        tl.store(mine + i, top)
        keys = tl.where(keys == top, _NOBODY, keys)
    tl.debug_barrier()
    if tl.atomic_add(tickets + row, 1, sem="acq_rel", scope="gpu") == CHUNKS - 1:
        k = tl.arange(0, ROUND * _BEST)
        there = (k < CHUNKS * _BEST) & (k % _BEST < wanted)
        rest = tl.load(
            parts + row * CHUNKS * _BEST + k, mask=there, other=_NOBODY, cache_modifier=".cg"
        )
        place = tl.arange(0, _BEST)
        found = tl.full((_BEST,), -1, tl.int32)
        ranks = tl.full((_BEST,), 0, tl.int32)
        for i in range(wanted):
            top = tl.max(rest, axis=0)
            winner = (top & _LAST).to(tl.int32) ^ _LAST
            winner = tl.where((top >> 32) > _FORBIDDEN, winner, tl.where(i == 0, 0, -1))
            found = tl.where(place == i, winner, found)
            ranks = tl.where(place == i, (top >> 32).to(tl.int32), ranks)
            rest = tl.where(rest == top, _NOBODY, rest)
        tl.store(best + row, tl.max(tl.where(place == 0, found, -1), axis=0))
        line = (tl.load(reply) * _ROWS + row) * _BEST
        tl.store(replies + line + place, found)
        if SUMS:
            tl.store(sums + line + place, unrank(ranks))
            tl.store(picked + row * _BEST + place, found)
            tl.store(picked_sums + row * _BEST + place, unrank(ranks))
        tl.store(tickets + row, 0)


class Chooser:
    """Room for the choice among rows of logits."""

    def __init__(self, device: torch.device, rows: int, vocab: int) -> None:
        def room(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.vocab, self.chunks = vocab, -(-vocab // _CHUNK)
        self.best = room(rows)
        self.picked = room(rows, BEST)
        self.picked_sums = room(rows, BEST, dtype=torch.float32)
        self._filters = Filters(device, rows, vocab, _CHUNK)
        self._values = room(rows * self.chunks, dtype=torch.float32)
        self._ids = room(rows * self.chunks)
        self._keys = room(rows * self.chunks * BEST, dtype=torch.int64)
        self._tickets = room(rows)

    def choose(
        self,
        logits: torch.Tensor,
        draws: torch.Tensor,
        rows: int,
        replies: torch.Tensor,
        reply: torch.Tensor,
        *,
        filtered: bool,
        several: bool,
        sums: torch.Tensor | None = None,
    ) -> None:
        """Fills `best` for the first rows of logits, and the row of `replies` that `reply` names.

        filtered, several: whether some row has filters, or wants more than one token. `sums` is
        where what the several were compared by goes.
        """
        if filtered:
            self._filters.find(logits, draws, rows)
        grid, ld, bars = (rows, self.chunks), logits.stride(0), self._filters.bars
        sizes = {
            "CHUNK": _CHUNK, "CHUNKS": self.chunks, "ROUND": triton.next_power_of_2(self.chunks),
            "num_warps": 8, "enable_fp_fusion": False,
        }  # fmt: skip
        if several:
            several_kernel[grid](
                logits, draws, bars, self.best, replies, replies if sums is None else sums, reply,
                self.picked, self.picked_sums, self._keys, self._tickets, ld, self.vocab,
                SUMS=sums is not None, **sizes,
            )  # fmt: skip
        else:
            choose_kernel[grid](
                logits, draws, bars, self.best, replies, reply, self._values, self._ids,
                self._tickets, ld, self.vocab, **sizes,
            )  # fmt: skip


def fill(rows: npt.NDArray[np.int32], draw: Draw, positions: IntArray) -> bool:
    """Describes the draws of rows that differ in their positions; says whether there are filters."""
    filtered = draw.top_k > 0 or draw.top_p < 1.0 or draw.min_p > 0.0
    floats, words = rows.view(np.float32), rows.view(np.uint32)
    floats[:, 0] = draw.temperature
    words[:, 1] = draw.top_k
    floats[:, 3] = np.float32(np.log(draw.min_p)) if draw.min_p > 0.0 else -np.inf
    words[:, 4], words[:, 5] = draw.seed & 0xFFFFFFFF, draw.seed >> 32 & 0xFFFFFFFF
    words[:, 6], words[:, 7] = draw.index & 0xFFFFFFFF, int(draw.purpose)
    words[:, POSITION], words[:, 9] = positions & 0xFFFFFFFF, filtered
    share = np.asarray([draw.top_p], dtype=np.float64).view(np.uint32)
    words[:, 10], words[:, 11] = share
    return filtered
