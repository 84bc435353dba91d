# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""The choice of tokens on the card: the rule of `core.sampling`, bit for bit where it has bits.

Philox, the logarithms and the sum of logit and noise are the same operations in the same order, with
no fused multiplications. Masses are whole numbers, as there, so their sums need no order.

Filters end in one bar per row, and the last id that is let in at the bar. Counts and masses above a
few levels show between which two of them the bar lies, once more above a few between those, and then
it is found by bisection among the ids in between. Where those are too many for that, or where top-k
and top-p are asked for at once and the ids above top-k's bar are too many, the whole row is searched,
slowly.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from outstride.core.sampling import Draw
from outstride.ops.cuda.layout import HEAD_ROWS, PLACES

_PLACES = tl.constexpr(PLACES)
_ROWS = tl.constexpr(HEAD_ROWS)
_CHUNK = 4096
POSITION = 8
"""Which word of a draw is its position."""
CANDIDATES = 8192
"""The most among which a bar is searched quickly."""
_LEVELS = tl.constexpr(8)
"""Levels of the first round."""
_WIDE = tl.constexpr(16)
"""Levels of the second round; in the first, there is the whole mass behind them."""
_LOWEST = tl.constexpr(-2147483647)
_ROUND = tl.constexpr(12582912.0)

_LN2 = tl.constexpr(0.6931471805599453)
_SQRT2 = tl.constexpr(1.4142135)
_TOP = tl.constexpr(3037000500)


@triton.jit
def _log1p(f):
    p = 0.07149753719568253 * f
    p = (p + -0.115712009370327) * f
    p = (p + 0.11661510914564133) * f
    p = (p + -0.12411050498485565) * f
    p = (p + 0.14249937236309052) * f
    p = (p + -0.1666848063468933) * f
    p = (p + 0.20000708103179932) * f
    p = (p + -0.24999989569187164) * f
    p = p + 0.3333333134651184
    z = f * f
    cubic = (f * z) * p
    return (f - 0.5 * z) + cubic


@triton.jit
def _log(x):
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    high = mantissa > _SQRT2
    mantissa = tl.where(high, mantissa * 0.5, mantissa)
    exponent = exponent + high.to(tl.int32)
    return exponent.to(tl.float32) * _LN2 + _log1p(mantissa - 1.0)


@triton.jit
def _gumbel(ids, position, index, purpose, key_low, key_high):
    """The noise of token ids at a position."""
    x0 = (ids >> 2).to(tl.uint32)
    x1 = tl.full(ids.shape, 0, tl.uint32) + position
    x2 = tl.full(ids.shape, 0, tl.uint32) + index
    x3 = tl.full(ids.shape, 0, tl.uint32) + purpose
    k0, k1 = key_low, key_high
    for _ in tl.static_range(10):
        a, b = tl.full(ids.shape, 0xD2511F53, tl.uint32), tl.full(ids.shape, 0xCD9E8D57, tl.uint32)
        high0, low0 = tl.umulhi(x0, a), x0 * a
        high1, low1 = tl.umulhi(x2, b), x2 * b
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
        k0, k1 = k0.to(tl.uint32), k1.to(tl.uint32)
    word = ids & 3
    words = tl.where(word == 0, x0, tl.where(word == 1, x1, tl.where(word == 2, x2, x3)))
    scale: tl.constexpr = 2.0**-32
    below = tl.minimum((words.to(tl.float32) + 0.5) * scale, 1.0)
    top = words >= _TOP
    gap = ((0 - words).to(tl.uint32).to(tl.float32) - 0.5) * scale
    near = -_log1p(tl.where(top, -gap, 0.0))
    return -_log(tl.where(top, near, -_log(below)))


@triton.jit
def _exp(x):
    """e**x for x <= 0."""
    tiny = x < -87.0
    x = tl.where(tiny, -87.0, x)
    n = x * 1.44269504
    n = n + _ROUND
    whole = n.to(tl.int32, bitcast=True) - 0x4B400000
    n = n - _ROUND
    r = x - n * 0.693145751953125
    r = r - n * 1.42860682e-06
    p = 0.0001989939192 * r
    p = (p + 0.001393373357) * r
    p = (p + 0.008333298378) * r
    p = (p + 0.04166646302) * r
    p = (p + 0.1666666716) * r
    p = p + 0.5
    p = (p * r) * r
    p = (p + r) + 1.0
    result = (p.to(tl.int32, bitcast=True) + (whole << 23)).to(tl.float32, bitcast=True)
    return tl.where(tiny, 0.0, result)


@triton.jit
def _mass(x, peak):
    """e**(x - peak) in units of 2**-40, rounded down."""
    return (_exp(x - peak) * 1099511627776.0).to(tl.int64)


@triton.jit
def _rank(x):
    """Integers in the order of floats; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _over(x, temperature, WIDTH: tl.constexpr):
    return tl.math.div_rn(x, tl.full((WIDTH,), 1.0, tl.float32) * temperature)


@triton.jit
def choose_kernel(
    logits, draws, bars, best, replies, reply, part_values, part_ids, tickets, ld, vocab,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """The id with the largest logit, or sum of logit and noise, among those above the bar.

    It goes to `best` for the pass behind this one, and to the host's memory: `reply` says where.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    draw = draws + row * _PLACES
    temperature = tl.load(draw).to(tl.float32, bitcast=True)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocab
    x = tl.load(logits + row.to(tl.int64) * ld + ids, mask=inside, other=float("-inf"))
    if temperature > 0:
        x = _over(x, temperature, CHUNK)
        bar, tie = tl.load(bars + row * 2), tl.load(bars + row * 2 + 1)
        filtered = tl.load(draw + 9)
        rank = _rank(x)
        x = tl.where(
            (filtered == 0) | (rank > bar) | ((rank == bar) & (ids <= tie)), x, float("-inf")
        )
        x += _gumbel(
            ids,
            tl.load(draw + 8).to(tl.uint32),
            tl.load(draw + 6).to(tl.uint32),
            tl.load(draw + 7).to(tl.uint32),
            tl.load(draw + 4).to(tl.uint32),
            tl.load(draw + 5).to(tl.uint32),
        )
    x = tl.where(inside, x, float("-inf"))
    top = tl.max(x, axis=0)
    winner = tl.min(tl.where((x == top) & inside, ids, vocab), axis=0)
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
        tl.store(replies + tl.load(reply) * _ROWS + row, winner)
        tl.store(tickets + row, 0)


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
        x = _over(x, temperature, CHUNK)
        peak = _peak(peaks, row, temperature, CHUNKS, ROUND)
        high, low = peak, peak
        if SECOND:
            top_k = tl.load(draw + 1)
            by_count = (top_k > 0) & (top_k < vocab)
            high, low, _, _, _, _ = _between(counts, masses, row, peak, peak, peak, by_count,
                                             top_k, _share(draw), 0)  # fmt: skip
        mass = _mass(x, peak)
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
        x = _over(x, temperature, CHUNK)
        rank = _rank(x)
        within = (ids < vocab) & ((rank > cut) | ((rank == cut) & (ids <= tie_cut)))
        above = within & ((rank > at) | ((rank == at) & (ids <= tie)))
        count += above.to(tl.int32)
        mass += tl.where(above, _mass(x, peak), 0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _search_row(row_logits, temperature, vocab, peak, cut, tie_cut, want_count, want_mass,
                CHUNK: tl.constexpr):  # fmt: skip
    """The highest bar at which enough ids and mass stand above, and the last id admitted at it."""
    low, high = tl.full((), _LOWEST, tl.int64), _rank(peak).to(tl.int64)
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
            x = _over(x, temperature, CHUNK)
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
                    rank, held = _rank(x), tl.where(within, _mass(x, peak), 0)
                    least, most = _rank(low), _rank(tl.minimum(roof, peak))
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
                least = _rank(peak + log_min_p)
                if least > bar:
                    bar, tie = least, tl.full((), 0, tl.int32) + vocab
            tl.store(bars + row * 2, bar)
            tl.store(bars + row * 2 + 1, tie)


class Chooser:
    """Room for the choice among rows of logits."""

    def __init__(self, device: torch.device, rows: int, vocab: int) -> None:
        def room(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.vocab, self.chunks = vocab, -(-vocab // _CHUNK)
        self.bars = room(rows, 2)
        self.best = room(rows)
        self._values = room(rows * self.chunks, dtype=torch.float32)
        self._ids = room(rows * self.chunks)
        self._tickets = room(rows)
        self._peaks = room(rows * self.chunks, dtype=torch.float32)
        self._counts, self._filled = room(rows, 2 * _WIDE.value), room(rows)
        self._masses = room(rows, 2 * _WIDE.value, dtype=torch.int64)
        self._found = room(rows, CANDIDATES, dtype=torch.float32)
        self._found_ids = room(rows, CANDIDATES)

    def choose(
        self,
        logits: torch.Tensor,
        draws: torch.Tensor,
        rows: int,
        filtered: bool,
        replies: torch.Tensor,
        reply: torch.Tensor,
    ) -> None:
        """Fills `best` for the first rows of logits, and the row of `replies` that `reply` names."""
        grid, ld = (rows, self.chunks), logits.stride(0)
        sizes = {"CHUNK": _CHUNK, "CHUNKS": self.chunks, "enable_fp_fusion": False}
        rounded = triton.next_power_of_2(self.chunks)
        if filtered:
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
        choose_kernel[grid](
            logits, draws, self.bars, self.best, replies, reply, self._values, self._ids,
            self._tickets, ld, self.vocab, ROUND=rounded, num_warps=8, **sizes,
        )  # fmt: skip


def fill(row: npt.NDArray[np.int32], draw: Draw, position: int) -> bool:
    """Describes a row's draw; says whether it has filters."""
    if draw.temperature == 0.0:
        row[0] = 0
        return False
    floats = row.view(np.float32)
    floats[0] = draw.temperature
    floats[3] = np.float32(np.log(draw.min_p)) if draw.min_p > 0.0 else -np.inf
    filtered = draw.top_k > 0 or draw.top_p < 1.0 or draw.min_p > 0.0
    words = row.view(np.uint32)
    words[1] = draw.top_k
    words[4], words[5] = draw.seed & 0xFFFFFFFF, draw.seed >> 32 & 0xFFFFFFFF
    words[6], words[7] = draw.index & 0xFFFFFFFF, int(draw.purpose)
    words[POSITION], words[9] = position & 0xFFFFFFFF, filtered
    row[10:12].view(np.float64)[0] = draw.top_p
    return filtered
