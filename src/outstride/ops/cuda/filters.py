# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""Top-k, top-p and min-p on the GPU: one threshold per row, and the last id admitted at it.

Counts and masses above a few levels show between which two of them the threshold lies; a second round
of levels narrows that down, and then it is found by bisection among the ids in between. Where those
are too many, or where top-k and top-p are asked for at once and the ids above top-k's threshold are too
many, the whole row is searched, slowly. Masses are integers, as in `core.sampling`, so their sums do
not depend on the order.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from outstride.ops.cuda.kernel_metadata import (
    SAMPLING_FILTERED,
    SAMPLING_LOG_MIN_P,
    SAMPLING_SIZE,
    SAMPLING_TEMPERATURE,
    SAMPLING_TOP_K,
    SAMPLING_TOP_P_HIGH,
    SAMPLING_TOP_P_LOW,
)
from outstride.ops.cuda.noise import mass as mass_of
from outstride.ops.cuda.noise import over
from outstride.ops.cuda.noise import rank as rank_of

MAX_SEARCHED = 8192
"""How many ids are searched quickly at most."""
_LEVELS = tl.constexpr(8)
"""Levels of the first round."""
_WIDE = tl.constexpr(16)
"""Levels of the second round; in the first, the whole mass is stored after them."""
_LOWEST = tl.constexpr(-2147483647)


@triton.jit
def _needed(top_p, total):
    """The mass that top-p admits."""
    share = top_p * total.to(tl.float64)
    whole = share.to(tl.int64)
    return whole + (whole.to(tl.float64) < share).to(tl.int64)


@triton.jit
def _top_p(record):
    """A row's top-p as float64."""
    low = tl.load(record + SAMPLING_TOP_P_LOW).to(tl.uint32)
    high = tl.load(record + SAMPLING_TOP_P_HIGH).to(tl.uint32)
    return ((high.to(tl.uint64) << 32) | low.to(tl.uint64)).to(tl.float64, bitcast=True)


@triton.jit
def _edge(peak, high, low, level, ROUND: tl.constexpr):
    """A level: first by its distance from the leader, then in equal parts of what is left."""
    if ROUND == 0:
        return peak - 0.25 * (level + 1.0) * (level + 2.0)
    return tl.where(level == _WIDE - 1, low, high - (high - low) * (0.0625 * (level + 1.0)))


@triton.jit
def _between(counts, masses, row, peak, high, low, by_count, top_k, top_p, ROUND: tl.constexpr):
    """Between which levels the threshold lies, what is above, and how many ids are in between.

    The last value is the number of the lower level, or one too many if even the lowest is too high.
    """
    levels: tl.constexpr = _WIDE if ROUND else _LEVELS
    level = tl.arange(0, _WIDE)
    count = tl.load(counts + (row * 2 + ROUND) * _WIDE + level)
    mass = tl.load(masses + (row * 2 + ROUND) * _WIDE + level)
    whole = tl.load(masses + row * 2 * _WIDE + _LEVELS)
    fits = tl.where(by_count, count >= top_k, mass >= _needed(top_p, whole))
    chosen = tl.min(tl.where(fits & (level < levels), level, levels), axis=0)
    size = tl.sum(tl.where(level == chosen, count, 0), axis=0)
    above = tl.sum(tl.where(level == chosen - 1, count, 0), axis=0)
    mass_above = tl.sum(tl.where(level == chosen - 1, mass, 0), axis=0)
    top = tl.where(chosen > 0, _edge(peak, high, low, chosen - 1, ROUND), high)
    return top, _edge(peak, high, low, chosen, ROUND), above, mass_above, size, chosen


@triton.jit
def peak_kernel(
    logits, sampling, peaks, counts, masses, filled, ld, vocab,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The largest logit of each chunk of a row; clears the counters of the next kernels."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    if tl.load(sampling + row * SAMPLING_SIZE + SAMPLING_FILTERED) != 0:
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row.to(tl.int64) * ld + ids, mask=ids < vocab, other=float("-inf"))
        tl.store(peaks + row * CHUNKS + chunk, tl.max(x, axis=0))
        if chunk == 0:
            level = tl.arange(0, 2 * _WIDE)
            tl.store(counts + row * 2 * _WIDE + level, tl.zeros_like(level))
            tl.store(masses + row * 2 * _WIDE + level, tl.zeros_like(level).to(tl.int64))
            tl.store(filled + row, 0)


@triton.jit
def _peak(peaks, row, temperature, CHUNKS: tl.constexpr, ROUND: tl.constexpr):
    k = tl.arange(0, ROUND)
    tops = tl.load(peaks + row * CHUNKS + k, mask=k < CHUNKS, other=float("-inf"))
    return tl.math.div_rn(tl.max(tops, axis=0), tl.full((), 1.0, tl.float32) * temperature)


@triton.jit
def level_kernel(
    logits, sampling, peaks, counts, masses, ld, vocab,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ROUND: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """How many ids, and what mass, stand above each level; the first time, also the whole mass."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    record = sampling + row * SAMPLING_SIZE
    if tl.load(record + SAMPLING_FILTERED) != 0:
        temperature = tl.load(record + SAMPLING_TEMPERATURE).to(tl.float32, bitcast=True)
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row.to(tl.int64) * ld + ids, mask=ids < vocab, other=float("-inf"))
        x = over(x, temperature, CHUNK)
        peak = _peak(peaks, row, temperature, CHUNKS, ROUND)
        high, low = peak, peak
        if SECOND:
            top_k = tl.load(record + SAMPLING_TOP_K)
            by_count = (top_k > 0) & (top_k < vocab)
            high, low, _, _, _, _ = _between(counts, masses, row, peak, peak, peak, by_count,
                                             top_k, _top_p(record), 0)  # fmt: skip
        mass = mass_of(x, peak)
        at = (row * 2 + SECOND) * _WIDE
        for level in tl.static_range(_WIDE if SECOND else _LEVELS):
            within = x >= _edge(peak, high, low, level, SECOND)
            count = tl.sum(within.to(tl.int32), axis=0)
            if count > 0:
                tl.atomic_add(counts + at + level, count)
                tl.atomic_add(masses + at + level, tl.sum(tl.where(within, mass, 0), axis=0))
        if not SECOND:
            tl.atomic_add(masses + at + _LEVELS, tl.sum(mass, axis=0))


@triton.jit
def _measure(row_logits, temperature, vocab, peak, cut, tie_cut, at, tie,
             CHUNK: tl.constexpr):  # fmt: skip
    """How many ids, and what mass, are at or above rank `at` (among those within the cut)."""
    lane = tl.arange(0, CHUNK)
    count = tl.zeros((CHUNK,), dtype=tl.int32)
    mass = tl.zeros((CHUNK,), dtype=tl.int64)
    for start in range(0, vocab, CHUNK):
        ids = start + lane
        x = tl.load(row_logits + ids, mask=ids < vocab, other=float("-inf"))
        x = over(x, temperature, CHUNK)
        rank = rank_of(x)
        within = (ids < vocab) & ((rank > cut) | ((rank == cut) & (ids <= tie_cut)))
        above = within & ((rank > at) | ((rank == at) & (ids <= tie)))
        count += above.to(tl.int32)
        mass += tl.where(above, mass_of(x, peak), 0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _search_row(row_logits, temperature, vocab, peak, cut, tie_cut, want_count, want_mass,
                CHUNK: tl.constexpr):  # fmt: skip
    """The highest threshold with enough ids and mass above it, and the last id admitted at it."""
    low, high = tl.full((), _LOWEST, tl.int64), rank_of(peak).to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        count, mass = _measure(row_logits, temperature, vocab, peak, cut, tie_cut,
                               middle.to(tl.int32), vocab, CHUNK)  # fmt: skip
        enough = (count >= want_count) & (mass >= want_mass)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    threshold = low.to(tl.int32)
    first, last = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32) + (vocab - 1)
    while first < last:
        middle = (first + last) // 2
        count, mass = _measure(row_logits, temperature, vocab, peak, cut, tie_cut, threshold, middle,
                               CHUNK)  # fmt: skip
        enough = (count >= want_count) & (mass >= want_mass)
        last = tl.where(enough, middle, last)
        first = tl.where(enough, first, middle + 1)
    return threshold, last


@triton.jit
def _search_few(rank, ids, mass, within, low, high, vocab, want_count, want_mass):
    """The same search among some ids, all of which together are enough."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        above = within & (rank >= middle)
        count = tl.sum(above.to(tl.int32), axis=0)
        enough = (count >= want_count) & (tl.sum(tl.where(above, mass, 0), axis=0) >= want_mass)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    threshold = low.to(tl.int32)
    first = tl.full((), 0, tl.int32)
    last = tl.full((), 0, tl.int32) + (vocab - 1)
    if tl.sum((within & (rank == threshold)).to(tl.int32), axis=0) == 1:
        first = last
    while first < last:
        middle = (first + last) // 2
        above = within & ((rank > threshold) | ((rank == threshold) & (ids <= middle)))
        count = tl.sum(above.to(tl.int32), axis=0)
        enough = (count >= want_count) & (tl.sum(tl.where(above, mass, 0), axis=0) >= want_mass)
        last = tl.where(enough, middle, last)
        first = tl.where(enough, first, middle + 1)
    return threshold, last


@triton.jit
def filter_kernel(
    logits, sampling, thresholds, peaks, counts, masses, found, found_ids, filled, counters, ld, vocab,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ROUND: tl.constexpr, MAX_IDS: tl.constexpr,
):  # fmt: skip
    """Top-k, top-p and min-p as one threshold per row: collects ids; the last program searches."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    record = sampling + row * SAMPLING_SIZE
    if tl.load(record + SAMPLING_FILTERED) != 0:
        temperature = tl.load(record + SAMPLING_TEMPERATURE).to(tl.float32, bitcast=True)
        top_k = tl.load(record + SAMPLING_TOP_K)
        top_p = _top_p(record)
        log_min_p = tl.load(record + SAMPLING_LOG_MIN_P).to(tl.float32, bitcast=True)
        by_count, by_mass = (top_k > 0) & (top_k < vocab), top_p < 1.0
        mine = logits + row.to(tl.int64) * ld
        peak = _peak(peaks, row, temperature, CHUNKS, ROUND)
        total = tl.load(masses + row * 2 * _WIDE + _LEVELS)
        high, low, above, mass_above, size, first = _between(
            counts, masses, row, peak, peak, peak, by_count, top_k, top_p, 0
        )
        roof = tl.full((), float("inf"), tl.float32)
        if (size > MAX_IDS) & (first < _LEVELS) & ~(by_count & by_mass):
            before, mass_before, edge = above, mass_above, first
            roof, low, above, mass_above, size, second = _between(
                counts, masses, row, peak, high, low, by_count, top_k, top_p, 1
            )
            above = tl.where(second > 0, above, before)
            mass_above = tl.where(second > 0, mass_above, mass_before)
            roof = tl.where((second == 0) & (edge == 0), float("inf"), roof)
            size -= above
        else:
            above, mass_above = tl.zeros_like(above), tl.zeros_like(mass_above)
        quick = (first < _LEVELS) & (size <= MAX_IDS)
        if quick & (by_count | by_mass):
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(mine + ids, mask=ids < vocab, other=float("-inf"))
            x = over(x, temperature, CHUNK)
            within = (x >= low) & (x < roof)
            place = tl.cumsum(within.to(tl.int32), axis=0) - 1
            here = tl.sum(within.to(tl.int32), axis=0)
            at = row * MAX_IDS + tl.atomic_add(filled + row, here) + place
            tl.store(found + at, x, mask=within)
            tl.store(found_ids + at, ids, mask=within)
        tl.debug_barrier()
        if tl.atomic_add(counters + row, 1, sem="acq_rel", scope="gpu") == CHUNKS - 1:
            tl.store(counters + row, 0)
            threshold, tie = tl.full((), _LOWEST, tl.int32), tl.full((), 0, tl.int32) + vocab
            nothing = tl.full((), 0, tl.int64)
            if by_count | by_mass:
                if quick:
                    lane = tl.arange(0, MAX_IDS)
                    within = lane < size
                    at = row * MAX_IDS + lane
                    x = tl.load(found + at, mask=within, other=float("-inf"),
                                cache_modifier=".cg")  # fmt: skip
                    ids = tl.load(found_ids + at, mask=within, other=vocab, cache_modifier=".cg")
                    rank, held = rank_of(x), tl.where(within, mass_of(x, peak), 0)
                    floor, top = rank_of(low), rank_of(tl.minimum(roof, peak))
                    if by_count:
                        threshold, tie = _search_few(rank, ids, held, within, floor, top, vocab,
                                               top_k - above, nothing)  # fmt: skip
                        within = within & (
                            (rank > threshold) | ((rank == threshold) & (ids <= tie))
                        )
                        total = tl.sum(tl.where(within, held, 0), axis=0)
                    if by_mass:
                        threshold, tie = _search_few(rank, ids, held, within, floor, top, vocab, 1,
                                               _needed(top_p, total) - mass_above)  # fmt: skip
                else:
                    if by_count:
                        threshold, tie = _search_row(
                            mine, temperature, vocab, peak, threshold, tie, top_k, nothing, CHUNK
                        )
                    if by_mass:
                        _, total = _measure(
                            mine, temperature, vocab, peak, threshold, tie, threshold, tie, CHUNK
                        )
                        threshold, tie = _search_row(
                            mine, temperature, vocab, peak, threshold, tie, 1,
                            _needed(top_p, total), CHUNK,
                        )  # fmt: skip
            if log_min_p > float("-inf"):
                floor = rank_of(peak + log_min_p)
                if floor > threshold:
                    threshold, tie = floor, tl.full((), 0, tl.int32) + vocab
            tl.store(thresholds + row * 2, threshold)
            tl.store(thresholds + row * 2 + 1, tie)


class SamplingFilters:
    """Buffers for the filters of [rows, vocab] logits."""

    def __init__(self, device: torch.device, rows: int, vocab: int, chunk: int) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.vocab, self.chunk, self.chunks = vocab, chunk, -(-vocab // chunk)
        self.thresholds = zeros(rows, 2)
        self._counters = zeros(rows)
        self._peaks = zeros(rows * self.chunks, dtype=torch.float32)
        self._counts, self._filled = zeros(rows, 2 * _WIDE.value), zeros(rows)
        self._masses = zeros(rows, 2 * _WIDE.value, dtype=torch.int64)
        self._found = zeros(rows, MAX_SEARCHED, dtype=torch.float32)
        self._found_ids = zeros(rows, MAX_SEARCHED)

    def find(self, logits: torch.Tensor, sampling: torch.Tensor, rows: int) -> None:
        """Fills `thresholds` for the first rows of logits."""
        grid, ld = (rows, self.chunks), logits.stride(0)
        sizes = {"CHUNK": self.chunk, "CHUNKS": self.chunks, "enable_fp_fusion": False}
        rounded = triton.next_power_of_2(self.chunks)
        peak_kernel[grid](
            logits, sampling, self._peaks, self._counts, self._masses, self._filled, ld,
            self.vocab, num_warps=8, **sizes,
        )  # fmt: skip
        for second in (False, True):
            level_kernel[grid](
                logits, sampling, self._peaks, self._counts, self._masses, ld, self.vocab,
                ROUND=rounded, SECOND=second, num_warps=8, **sizes,
            )  # fmt: skip
        filter_kernel[grid](
            logits, sampling, self.thresholds, self._peaks, self._counts, self._masses, self._found,
            self._found_ids, self._filled, self._counters, ld, self.vocab,
            ROUND=rounded, MAX_IDS=MAX_SEARCHED, num_warps=16, **sizes,
        )  # fmt: skip
