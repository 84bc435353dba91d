# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""Top-k, top-p and min-p on the card: one bar per row, and the last id that is let in at the bar.

Counts and masses above a few levels show between which two of them the bar lies, once more above a
few between those, and then it is found by bisection among the ids in between. Where those are too
many for that, or where top-k and top-p are asked for at once and the ids above top-k's bar are too
many, the whole row is searched, slowly. Masses are whole numbers, as in `core.sampling`, so their
sums need no order.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from outstride.ops.cuda.layout import PLACES
from outstride.ops.cuda.noise import mass as mass_of
from outstride.ops.cuda.noise import over
from outstride.ops.cuda.noise import rank as rank_of

_PLACES = tl.constexpr(PLACES)
CANDIDATES = 8192
"""The most among which a bar is searched quickly."""
_LEVELS = tl.constexpr(8)
"""Levels of the first round."""
_WIDE = tl.constexpr(16)
"""Levels of the second round; in the first, there is the whole mass behind them."""
_LOWEST = tl.constexpr(-2147483647)


@triton.jit
def _needed(top_p, total):
    """The mass that top-p asks for."""
    share = top_p * total.to(tl.float64)
    whole = share.to(tl.int64)
    return whole + (whole.to(tl.float64) < share).to(tl.int64)


@triton.jit
def _share(draw):
    """A row's top-p, in the precision in which it was asked for."""
    low, high = tl.load(draw + 10).to(tl.uint32), tl.load(draw + 11).to(tl.uint32)
    return ((high.to(tl.uint64) << 32) | low.to(tl.uint64)).to(tl.float64, bitcast=True)


@triton.jit
def _edge(peak, high, low, level, ROUND: tl.constexpr):
    """A level: first by its distance from the leader, then in equal parts of what is left."""
    if ROUND == 0:
        return peak - 0.25 * (level + 1.0) * (level + 2.0)
    return tl.where(level == _WIDE - 1, low, high - (high - low) * (0.0625 * (level + 1.0)))


@triton.jit
def _between(counts, masses, row, peak, high, low, by_count, top_k, top_p, ROUND: tl.constexpr):
    """Between which levels the bar lies, what stands above, and how many ids stand in between.

    The last is the number of the lower level, or one too many if even the lowest is too high.
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
    logits, draws, peaks, counts, masses, filled, ld, vocab,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The largest logit of each chunk of a row; makes room for what is counted next."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    if tl.load(draws + row * _PLACES + 9) != 0:
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
    logits, draws, peaks, counts, masses, ld, vocab,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ROUND: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """How many ids, and what mass, stand above each level; the first time, also the whole mass."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    draw = draws + row * _PLACES
    if tl.load(draw + 9) != 0:
        temperature = tl.load(draw).to(tl.float32, bitcast=True)
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row.to(tl.int64) * ld + ids, mask=ids < vocab, other=float("-inf"))
        x = over(x, temperature, CHUNK)
        peak = _peak(peaks, row, temperature, CHUNKS, ROUND)
        high, low = peak, peak
        if SECOND:
            top_k = tl.load(draw + 1)
            by_count = (top_k > 0) & (top_k < vocab)
            high, low, _, _, _, _ = _between(counts, masses, row, peak, peak, peak, by_count,
                                             top_k, _share(draw), 0)  # fmt: skip
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
    """How many ids, and what mass, stand at or above rank `at` (among those within the cut)."""
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
    """The highest bar at which enough ids and mass stand above, and the last id admitted at it."""
    low, high = tl.full((), _LOWEST, tl.int64), rank_of(peak).to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        count, mass = _measure(row_logits, temperature, vocab, peak, cut, tie_cut,
                               middle.to(tl.int32), vocab, CHUNK)  # fmt: skip
        enough = (count >= want_count) & (mass >= want_mass)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    bar = low.to(tl.int32)
    first, last = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32) + (vocab - 1)
    while first < last:
        middle = (first + last) // 2
        count, mass = _measure(row_logits, temperature, vocab, peak, cut, tie_cut, bar, middle,
                               CHUNK)  # fmt: skip
        enough = (count >= want_count) & (mass >= want_mass)
        last = tl.where(enough, middle, last)
        first = tl.where(enough, first, middle + 1)
    return bar, last


@triton.jit
def _search_few(rank, ids, mass, within, low, high, vocab, want_count, want_mass):
    """The same among candidates; all of them together are enough."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        above = within & (rank >= middle)
        count = tl.sum(above.to(tl.int32), axis=0)
        enough = (count >= want_count) & (tl.sum(tl.where(above, mass, 0), axis=0) >= want_mass)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    bar = low.to(tl.int32)
    first = tl.full((), 0, tl.int32)
    last = tl.full((), 0, tl.int32) + (vocab - 1)
    if tl.sum((within & (rank == bar)).to(tl.int32), axis=0) == 1:
        first = last
    while first < last:
        middle = (first + last) // 2
        above = within & ((rank > bar) | ((rank == bar) & (ids <= middle)))
        count = tl.sum(above.to(tl.int32), axis=0)
        enough = (count >= want_count) & (tl.sum(tl.where(above, mass, 0), axis=0) >= want_mass)
        last = tl.where(enough, middle, last)
        first = tl.where(enough, first, middle + 1)
    return bar, last


@triton.jit
def filter_kernel(
    logits, draws, bars, peaks, counts, masses, found, found_ids, filled, tickets, ld, vocab,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ROUND: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Top-k, top-p and min-p as one bar per row: collects candidates; the last program searches."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    draw = draws + row * _PLACES
    if tl.load(draw + 9) != 0:
        temperature = tl.load(draw).to(tl.float32, bitcast=True)
        top_k = tl.load(draw + 1)
        top_p = _share(draw)
        log_min_p = tl.load(draw + 3).to(tl.float32, bitcast=True)
        by_count, by_mass = (top_k > 0) & (top_k < vocab), top_p < 1.0
        mine = logits + row.to(tl.int64) * ld
        peak = _peak(peaks, row, temperature, CHUNKS, ROUND)
        total = tl.load(masses + row * 2 * _WIDE + _LEVELS)
        high, low, above, mass_above, size, first = _between(
            counts, masses, row, peak, peak, peak, by_count, top_k, top_p, 0
        )
        roof = tl.full((), float("inf"), tl.float32)
        if (size > MOST) & (first < _LEVELS) & ~(by_count & by_mass):
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
        quick = (first < _LEVELS) & (size <= MOST)
        if quick & (by_count | by_mass):
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(mine + ids, mask=ids < vocab, other=float("-inf"))
            x = over(x, temperature, CHUNK)
            within = (x >= low) & (x < roof)
            place = tl.cumsum(within.to(tl.int32), axis=0) - 1
            here = tl.sum(within.to(tl.int32), axis=0)
            at = row * MOST + tl.atomic_add(filled + row, here) + place
            tl.store(found + at, x, mask=within)
            tl.store(found_ids + at, ids, mask=within)
        tl.debug_barrier()
        if tl.atomic_add(tickets + row, 1, sem="acq_rel", scope="gpu") == CHUNKS - 1:
            tl.store(tickets + row, 0)
            bar, tie = tl.full((), _LOWEST, tl.int32), tl.full((), 0, tl.int32) + vocab
            nothing = tl.full((), 0, tl.int64)
            if by_count | by_mass:
                if quick:
                    lane = tl.arange(0, MOST)
                    within = lane < size
                    at = row * MOST + lane
                    x = tl.load(found + at, mask=within, other=float("-inf"),
                                cache_modifier=".cg")  # fmt: skip
                    ids = tl.load(found_ids + at, mask=within, other=vocab, cache_modifier=".cg")
                    rank, held = rank_of(x), tl.where(within, mass_of(x, peak), 0)
                    least, most = rank_of(low), rank_of(tl.minimum(roof, peak))
                    if by_count:
                        bar, tie = _search_few(rank, ids, held, within, least, most, vocab,
                                               top_k - above, nothing)  # fmt: skip
                        within = within & ((rank > bar) | ((rank == bar) & (ids <= tie)))
                        total = tl.sum(tl.where(within, held, 0), axis=0)
                    if by_mass:
                        bar, tie = _search_few(rank, ids, held, within, least, most, vocab, 1,
                                               _needed(top_p, total) - mass_above)  # fmt: skip
                else:
                    if by_count:
                        bar, tie = _search_row(mine, temperature, vocab, peak, bar, tie, top_k,
                                               nothing, CHUNK)  # fmt: skip
                    if by_mass:
                        _, total = _measure(mine, temperature, vocab, peak, bar, tie, bar, tie,
                                            CHUNK)  # fmt: skip
                        bar, tie = _search_row(mine, temperature, vocab, peak, bar, tie, 1,
                                               _needed(top_p, total), CHUNK)  # fmt: skip
            if log_min_p > float("-inf"):
                least = rank_of(peak + log_min_p)
                if least > bar:
                    bar, tie = least, tl.full((), 0, tl.int32) + vocab
            tl.store(bars + row * 2, bar)
            tl.store(bars + row * 2 + 1, tie)


class Filters:
    """Room for the filters of some rows of logits."""

    def __init__(self, device: torch.device, rows: int, vocab: int, chunk: int) -> None:
        def room(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.vocab, self.chunk, self.chunks = vocab, chunk, -(-vocab // chunk)
        self.bars = room(rows, 2)
        self._tickets = room(rows)
        self._peaks = room(rows * self.chunks, dtype=torch.float32)
        self._counts, self._filled = room(rows, 2 * _WIDE.value), room(rows)
        self._masses = room(rows, 2 * _WIDE.value, dtype=torch.int64)
        self._found = room(rows, CANDIDATES, dtype=torch.float32)
        self._found_ids = room(rows, CANDIDATES)

    def find(self, logits: torch.Tensor, draws: torch.Tensor, rows: int) -> None:
        """Fills `bars` for the first rows of logits."""
        grid, ld = (rows, self.chunks), logits.stride(0)
        sizes = {"CHUNK": self.chunk, "CHUNKS": self.chunks, "enable_fp_fusion": False}
        rounded = triton.next_power_of_2(self.chunks)
        peak_kernel[grid](
            logits, draws, self._peaks, self._counts, self._masses, self._filled, ld,
            self.vocab, num_warps=8, **sizes,
        )  # fmt: skip
        for second in (False, True):
            level_kernel[grid](
                logits, draws, self._peaks, self._counts, self._masses, ld, self.vocab,
                ROUND=rounded, SECOND=second, num_warps=8, **sizes,
            )  # fmt: skip
        filter_kernel[grid](
            logits, draws, self.bars, self._peaks, self._counts, self._masses, self._found,
            self._found_ids, self._filled, self._tickets, ld, self.vocab,
            ROUND=rounded, MOST=CANDIDATES, num_warps=16, **sizes,
        )  # fmt: skip
