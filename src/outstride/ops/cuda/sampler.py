# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""Sampling on the GPU: the rule of `core.sampling`, bit for bit.

One token a row, or the top candidates of each. Candidates are taken one after the other by keys that
hold the sum of logit and noise and, below it, the id: no two are equal, and ties go to the lowest id.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from outstride.core.graph import IntArray
from outstride.core.sampling import SamplingSpec
from outstride.ops.cuda.filters import SamplingFilters
from outstride.ops.cuda.kernel_metadata import (
    MAX_CANDIDATES,
    MAX_HEAD_ROWS,
    SAMPLING_FILTERED,
    SAMPLING_INDEX,
    SAMPLING_NUM_TOKENS,
    SAMPLING_POSITION,
    SAMPLING_PURPOSE,
    SAMPLING_SEED_HIGH,
    SAMPLING_SEED_LOW,
    SAMPLING_SIZE,
    SAMPLING_TEMPERATURE,
)
from outstride.ops.cuda.metadata import MAX_CANDIDATES as CANDIDATES
from outstride.ops.cuda.metadata import SamplingField
from outstride.ops.cuda.noise import gumbel, over, rank, unrank

_CHUNK = 4096
_NO_KEY = tl.constexpr(-(1 << 63))
"""Below all keys."""
_FORBIDDEN = tl.constexpr(-2139095041)
"""The rank of minus infinity."""
_LAST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _sums(logits, record, thresholds, row, ids, vocab, ld, CHUNK: tl.constexpr):
    """What is compared [CHUNK]: logits, or logit plus noise of the ids that the filters admit."""
    temperature = tl.load(record + SAMPLING_TEMPERATURE).to(tl.float32, bitcast=True)
    inside = ids < vocab
    x = tl.load(logits + row.to(tl.int64) * ld + ids, mask=inside, other=float("-inf"))
    if temperature > 0:
        x = over(x, temperature, CHUNK)
        threshold, tie = tl.load(thresholds + row * 2), tl.load(thresholds + row * 2 + 1)
        filtered = tl.load(record + SAMPLING_FILTERED)
        place = rank(x)
        x = tl.where(
            (filtered == 0) | (place > threshold) | ((place == threshold) & (ids <= tie)),
            x,
            float("-inf"),
        )
        x += gumbel(
            ids,
            tl.load(record + SAMPLING_POSITION).to(tl.uint32),
            tl.load(record + SAMPLING_INDEX).to(tl.uint32),
            tl.load(record + SAMPLING_PURPOSE).to(tl.uint32),
            tl.load(record + SAMPLING_SEED_LOW).to(tl.uint32),
            tl.load(record + SAMPLING_SEED_HIGH).to(tl.uint32),
        )
    return tl.where(inside, x, float("-inf"))


@triton.jit
def argmax_kernel(
    logits, sampling, thresholds, best, replies, reply, part_values, part_ids, counters, ld, vocab,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """The id with the largest logit, or sum of logit and noise, among those that filters admit.

    It goes to `best` for the pass after this one, and to the host's memory: `reply` says where.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _sums(logits, sampling + row * SAMPLING_SIZE, thresholds, row, ids, vocab, ld, CHUNK)
    top = tl.max(x, axis=0)
    winner = tl.min(tl.where((x == top) & (ids < vocab), ids, vocab), axis=0)
    at = row * CHUNKS + chunk
    tl.store(part_values + at, top)
    tl.store(part_ids + at, winner)
    tl.debug_barrier()
    if tl.atomic_add(counters + row, 1, sem="acq_rel", scope="gpu") == CHUNKS - 1:
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
        tl.store(replies + (tl.load(reply) * MAX_HEAD_ROWS + row) * MAX_CANDIDATES, winner)
        tl.store(counters + row, 0)


@triton.jit
def candidates_kernel(
    logits, sampling, thresholds, best, replies, sums, reply, picked, picked_sums, parts, counters,
    ld, vocab,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ROUND: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """The top candidates of each row, as many as its sampling record says; -1 stands for no more.

    With SUMS, what was compared goes to the host as well, and both stay on the GPU (`picked`).
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    record = sampling + row * SAMPLING_SIZE
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _sums(logits, record, thresholds, row, ids, vocab, ld, CHUNK)
    keys = (rank(x).to(tl.int64) << 32) | (ids ^ _LAST).to(tl.int64)
    keys = tl.where(ids < vocab, keys, _NO_KEY)
    wanted = tl.maximum(tl.load(record + SAMPLING_NUM_TOKENS), 1)
    mine = parts + (row * CHUNKS + chunk) * MAX_CANDIDATES
    for i in range(wanted):
        top = tl.max(keys, axis=0)
        tl.store(mine + i, top)
        keys = tl.where(keys == top, _NO_KEY, keys)
    tl.debug_barrier()
    if tl.atomic_add(counters + row, 1, sem="acq_rel", scope="gpu") == CHUNKS - 1:
        k = tl.arange(0, ROUND * MAX_CANDIDATES)
        there = (k < CHUNKS * MAX_CANDIDATES) & (k % MAX_CANDIDATES < wanted)
        rest = tl.load(
            parts + row * CHUNKS * MAX_CANDIDATES + k,
            mask=there,
            other=_NO_KEY,
            cache_modifier=".cg",
        )
        place = tl.arange(0, MAX_CANDIDATES)
        found = tl.full((MAX_CANDIDATES,), -1, tl.int32)
        ranks = tl.full((MAX_CANDIDATES,), 0, tl.int32)
        for i in range(wanted):
            top = tl.max(rest, axis=0)
            winner = (top & _LAST).to(tl.int32) ^ _LAST
            winner = tl.where((top >> 32) > _FORBIDDEN, winner, tl.where(i == 0, 0, -1))
            found = tl.where(place == i, winner, found)
            ranks = tl.where(place == i, (top >> 32).to(tl.int32), ranks)
            rest = tl.where(rest == top, _NO_KEY, rest)
        tl.store(best + row, tl.max(tl.where(place == 0, found, -1), axis=0))
        line = (tl.load(reply) * MAX_HEAD_ROWS + row) * MAX_CANDIDATES
        tl.store(replies + line + place, found)
        if SUMS:
            tl.store(sums + line + place, unrank(ranks))
            tl.store(picked + row * MAX_CANDIDATES + place, found)
            tl.store(picked_sums + row * MAX_CANDIDATES + place, unrank(ranks))
        tl.store(counters + row, 0)


class TokenSampler:
    """Buffers for sampling from [rows, vocab] logits."""

    def __init__(self, device: torch.device, rows: int, vocab: int) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.vocab, self.chunks = vocab, -(-vocab // _CHUNK)
        self.best = zeros(rows)
        self.picked = zeros(rows, CANDIDATES)
        self.picked_sums = zeros(rows, CANDIDATES, dtype=torch.float32)
        self._filters = SamplingFilters(device, rows, vocab, _CHUNK)
        self._values = zeros(rows * self.chunks, dtype=torch.float32)
        self._ids = zeros(rows * self.chunks)
        self._keys = zeros(rows * self.chunks * CANDIDATES, dtype=torch.int64)
        self._counters = zeros(rows)

    def sample(
        self,
        logits: torch.Tensor,
        sampling: torch.Tensor,
        rows: int,
        replies: torch.Tensor,
        reply: torch.Tensor,
        *,
        filtered: bool,
        several: bool,
        sums: torch.Tensor | None = None,
    ) -> None:
        """Fills `best` for the first rows of logits, and the row of `replies` that `reply` names.

        filtered, several: whether some row has filters, or wants more than one token.
        sums: where the sums go by which several candidates were compared.
        """
        if filtered:
            self._filters.find(logits, sampling, rows)
        grid, ld, thresholds = (rows, self.chunks), logits.stride(0), self._filters.thresholds
        sizes = {
            "CHUNK": _CHUNK, "CHUNKS": self.chunks, "ROUND": triton.next_power_of_2(self.chunks),
            "num_warps": 8, "enable_fp_fusion": False,
        }  # fmt: skip
        if several:
            candidates_kernel[grid](
                logits, sampling, thresholds, self.best, replies,
                replies if sums is None else sums, reply, self.picked, self.picked_sums,
                self._keys, self._counters, ld, self.vocab,
                SUMS=sums is not None, **sizes,
            )  # fmt: skip
        else:
            argmax_kernel[grid](
                logits, sampling, thresholds, self.best, replies, reply, self._values, self._ids,
                self._counters, ld, self.vocab, **sizes,
            )  # fmt: skip


def fill_sampling(records: npt.NDArray[np.int32], spec: SamplingSpec, positions: IntArray) -> bool:
    """Fills the sampling records [rows, SAMPLING_SIZE] of rows that differ in their positions.

    Returns whether there are filters.
    """
    filtered = spec.top_k > 0 or spec.top_p < 1.0 or spec.min_p > 0.0
    floats, words, field = records.view(np.float32), records.view(np.uint32), SamplingField
    floats[:, field.TEMPERATURE] = spec.temperature
    words[:, field.TOP_K] = spec.top_k
    floats[:, field.LOG_MIN_P] = np.float32(np.log(spec.min_p)) if spec.min_p > 0.0 else -np.inf
    words[:, field.SEED_LOW] = spec.seed & 0xFFFFFFFF
    words[:, field.SEED_HIGH] = spec.seed >> 32 & 0xFFFFFFFF
    words[:, field.INDEX], words[:, field.PURPOSE] = spec.index & 0xFFFFFFFF, int(spec.purpose)
    words[:, field.POSITION], words[:, field.FILTERED] = positions & 0xFFFFFFFF, filtered
    top_p = np.asarray([spec.top_p], dtype=np.float64).view(np.uint32)
    words[:, field.TOP_P_LOW], words[:, field.TOP_P_HIGH] = top_p
    return filtered
